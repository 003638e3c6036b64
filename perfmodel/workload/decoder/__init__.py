"""Parts of a transformer layer written as operators: one file for each kind of mixer and feed-forward."""
