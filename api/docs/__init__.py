"""Documentation of the service: OpenAPI as JSON, and a page that shows it without any request to another host."""
