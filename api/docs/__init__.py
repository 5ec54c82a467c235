"""The service's description of itself: OpenAPI as JSON, and a page that shows it without asking any other host."""
