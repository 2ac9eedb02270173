"""Render stored records: tables of the documents, pictures, the report page."""
