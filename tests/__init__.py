"""Tests, one module for each of the product's; `samples` makes diagnoses by hand."""
