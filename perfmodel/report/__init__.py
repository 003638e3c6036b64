"""Reports: predicted against published runs."""
