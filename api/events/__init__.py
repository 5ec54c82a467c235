"""What happens to jobs, told to others: CloudEvents by streams and webhooks, and spans for OpenTelemetry."""
