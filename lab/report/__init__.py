"""Render stored records as tables for the documents, as pictures and as the HTML report."""
