"""Runners: execute a StepPlan on a device and report a StepOutcome."""
