"""What the tests of deploy/ ask of manifests: rendering, and schemas that refuse unknown keys."""

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
OVERLAYS = sorted(path.name for path in (DEPLOY / "kuberay" / "overlays").iterdir())
VALUES = sorted(path.stem for path in (DEPLOY / "helm" / "examples").glob("*.yaml"))

Manifest = dict[str, Any]

# Custom resources without a schema here: the keys that are used of them.
_MONITORING = {
    "PodMonitor": {
        "selector": {"matchLabels": None},
        "podMetricsEndpoints": {
            "port": None,
            "path": None,
            "interval": None,
            "scheme": None,
            "tlsConfig": {"insecureSkipVerify": None},
            "authorization": {"type": None, "credentials": {"name": None, "key": None}},
        },
    },
    "PrometheusRule": {
        "groups": {
            "name": None,
            "rules": {
                **dict.fromkeys(("alert", "expr", "for")),
                "labels": None,
                "annotations": None,
            },
        }
    },
}
_KUBERAY_SCHEMAS = (ROOT.parent / "shared" / "kuberay_schemas", ROOT / "shared/kuberay_schemas")


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def ray_cluster(manifests: tuple[Manifest, ...]) -> Manifest:
    """The spec of the one cluster, whichever kind carries it."""
    (resource,) = [m for m in manifests if m["apiVersion"] == "ray.io/v1"]
    spec = resource["spec"]
    return spec["rayClusterConfig"] if resource["kind"] == "RayService" else spec


def pods(manifests: tuple[Manifest, ...]) -> list[Manifest]:
    """The specs of all pods."""
    cluster = ray_cluster(manifests)
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    others = [m["spec"]["template"]["spec"] for m in of_kind(manifests, "StatefulSet")]
    return [group["template"]["spec"] for group in groups] + others


@cache
def rendered(name: str) -> tuple[Manifest, ...]:
    """An overlay of Kustomize ("kustomize/NAME") or example values of the chart ("helm/NAME")."""
    how, _, what = name.partition("/")
    return _kustomize(what) if how == "kustomize" else render_chart(_values(what))


def _kustomize(overlay: str) -> tuple[Manifest, ...]:
    kubectl = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which(
        "kubectl"
    )
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    folder = DEPLOY / "kuberay" / "overlays" / overlay
    result = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return tuple(yaml.safe_load_all(result.stdout))


def _values(name: str) -> Manifest:
    return yaml.safe_load((DEPLOY / "helm" / "examples" / f"{name}.yaml").read_text()) or {}


def render_chart(values: Manifest) -> tuple[Manifest, ...]:
    """The chart as Helm itself renders it."""
    helm = pytest.importorskip("helm_python", exc_type=ImportError)
    with helm.Chart.load(DEPLOY / "helm" / "pagefleet") as chart:
        chart.validate_schema(values)
        texts = chart.render(values, name="pagefleet", namespace="serving")
    documents = [
        document
        for path, text in sorted(texts.items())
        if path.endswith(".yaml")
        for document in yaml.safe_load_all(text)
    ]
    return tuple(document for document in documents if document)


def problems(manifest: Manifest) -> list[str]:
    """What the schema of its kind finds wrong; unknown keys too."""
    if manifest["apiVersion"] == "ray.io/v1":
        errors = _ray_validator(manifest["kind"]).iter_errors(manifest)
        return [f"{error.json_path}: {error.message}" for error in errors]
    if manifest["apiVersion"] == "monitoring.coreos.com/v1":
        return list(_unknown_keys(manifest["spec"], _MONITORING[manifest["kind"]], "spec"))
    try:
        kubernetes_validate.validate(manifest, "1.34", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [str(error)]
    return []


@cache
def _ray_validator(kind: str) -> jsonschema.Draft202012Validator:
    for folder in _KUBERAY_SCHEMAS:
        path = folder / f"{kind}.v1.json"
        if path.is_file():
            schema = json.loads(path.read_text())
            # the API server's own, which the CRD leaves open
            schema["properties"]["metadata"] = True
            return jsonschema.Draft202012Validator(_strict(schema))
    pytest.skip("KubeRay's schemas are not here")


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(part) for key, part in schema.items() if not key.startswith("x-")}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        strict.setdefault("additionalProperties", bool(open_ended))
    return strict


def _unknown_keys(value: Any, known: Any, path: str):
    if known is None:
        return
    for part in value if isinstance(value, list) else [value]:
        for key, inner in part.items():
            if key not in known:
                yield f"{path}.{key} is not known"
            else:
                yield from _unknown_keys(inner, known[key], f"{path}.{key}")
