"""What is read from vLLM's source, against what its import says."""

import dataclasses

from raypo.serving.vllm_arguments import engine_argument_names


def test_the_source_says_what_the_imported_class_says():
    from vllm.engine.arg_utils import EngineArgs

    assert engine_argument_names() == {field.name for field in dataclasses.fields(EngineArgs)}
