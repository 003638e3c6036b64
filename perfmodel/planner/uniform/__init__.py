"""The space of uniform plans and its sweep."""
