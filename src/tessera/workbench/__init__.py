"""Measure, verify, tune and report. The product imports nothing from here."""
