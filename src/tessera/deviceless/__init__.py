"""Compile for chips that this machine lacks, read their schedules, and predict times."""
