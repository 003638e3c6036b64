"""Export of torch modules, and conversion to imported graphs."""
