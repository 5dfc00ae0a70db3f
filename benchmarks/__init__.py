"""What the project costs and gains: measured, against what an expert would write by hand."""
