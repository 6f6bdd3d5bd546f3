"""The one door to `kubeflow-trainer-api`: models of JobSet and Kubeflow Trainer, made strict.

Owns: turning a model into a schema in which an unknown field is an error. Does not own: rules
between fields (`lints.admission`). The models are those of one release of Trainer; a cluster's own
CRDs (`--crd`) come before them.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator

_MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): (
        "jobset_v1alpha2_job_set",
        "JobsetV1alpha2JobSet",
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): (
        "trainer_v1alpha1_train_job",
        "TrainerV1alpha1TrainJob",
    ),
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): (
        "trainer_v1alpha1_training_runtime",
        "TrainerV1alpha1TrainingRuntime",
    ),
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): (
        "trainer_v1alpha1_cluster_training_runtime",
        "TrainerV1alpha1ClusterTrainingRuntime",
    ),
}
# Classes that stand for one value of several types; as models they would be objects.
_UNIONS = {
    "IoK8sApimachineryPkgApiResourceQuantity": {"type": ["string", "number"]},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": {"type": ["string", "integer"]},
}


@lru_cache(maxsize=8)
def operator_schema(api_version: str, kind: str) -> Any | None:
    """The validator of an operator's kind; None for any other."""
    named = _MODELS.get((api_version, kind))
    if named is None:
        return None
    module = importlib.import_module(f"kubeflow_trainer_api.models.{named[0]}")
    schema = getattr(module, named[1]).model_json_schema(by_alias=True)
    return Draft202012Validator(strict(schema))


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A model's schema in which unknown fields are errors and null is no value of its own."""
    made = _strict(schema)
    definitions = {
        name: _UNIONS.get(name) or _strict(definition)
        for name, definition in schema.get("$defs", {}).items()
    }
    return {**made, "$defs": definitions}


def _strict(part: Any) -> Any:
    if isinstance(part, list):
        return [_strict(item) for item in part]
    if not isinstance(part, dict):
        return part
    options = part.get("anyOf")
    if isinstance(options, list):
        real = [option for option in options if option != {"type": "null"}]
        if len(real) == 1:
            return _strict(real[0])
    made = {
        key: {name: _strict(field) for name, field in value.items()}
        if key == "properties"
        else _strict(value)
        for key, value in part.items()
        if key not in ("default", "description", "title", "$defs")
    }
    if "properties" in part and "additionalProperties" not in part:
        made["additionalProperties"] = False
    return made
