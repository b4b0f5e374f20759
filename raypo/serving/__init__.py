"""Engines and frozen models, as plain classes that run as Ray actors."""
