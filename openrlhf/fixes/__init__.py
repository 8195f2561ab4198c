"""Repairs of upstream faults that our features and users meet, each until upstream repairs it."""
