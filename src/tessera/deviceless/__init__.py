"""Chips that are not there: compile for them, read the schedule, predict the time."""
