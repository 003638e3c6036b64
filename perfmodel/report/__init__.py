"""Text, tables, figures and HTML pages of results."""
