"""Tables of a keyed stream: the first rows of each key, one row of each key, values that are carried from row to row."""
