"""Comparison of a final answer with the gold one: `equality` decides, by numbers and choices, then by
`forms` (lists, intervals, relations) and `expressions` (symbolic equality), of text that `notation`
has made plain, within `limits`."""
