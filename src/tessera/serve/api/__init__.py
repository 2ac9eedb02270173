"""What the OpenAI API says: bodies of requests, conversations for chat templates, calls in answers, responses."""
