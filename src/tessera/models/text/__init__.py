"""Turn text into tokens and back, and conversations into text: tokenizers and chat templates."""
