"""Space of uniform plans and its sweep."""
