"""vLLM engines, reference models and reward models: plain classes that run as Ray actors."""
