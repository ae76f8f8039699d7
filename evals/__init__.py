"""Faults with known answers, and how well eroica finds them. Not part of the product: `eroica` never imports this."""
