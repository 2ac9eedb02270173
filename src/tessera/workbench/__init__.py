"""Measure, verify, tune and report. Product code imports nothing from here."""
