"""Barriers and watermarks at a subtask's inputs: aligned, tracked, overtaking; the gate that reads the channels."""
