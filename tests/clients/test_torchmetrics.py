"""torchmetrics, NumPy and scikit-learn on outputs, which are ShardedBatches."""

import pickle

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

import everygpu
from tests.parallel.oracle import TOLERANCE, Mlp, pair, rows

torchmetrics = pytest.importorskip("torchmetrics")

LABELS = torch.arange(22) % 3 % 2

MULTICLASS = ("Accuracy", "AUROC", "ConfusionMatrix", "CalibrationError")
BINARY = ("Accuracy", "AUROC", "PrecisionRecallCurve")
REGRESSION = ("MeanSquaredError", "R2Score", "SpearmanCorrCoef", "CosineSimilarity")
OUTPUTS = ("SpearmanCorrCoef",)


def metric(kind, name):
    if kind == "regression":
        return getattr(torchmetrics, name)(**({"num_outputs": 2} if name in OUTPUTS else {}))
    return getattr(torchmetrics, name)(task=kind, num_classes=2)


def cases():
    return [(kind, name) for kind, names in
            (("multiclass", MULTICLASS), ("binary", BINARY), ("regression", REGRESSION)) for name in names]  # fmt: skip


def arguments(kind, output, device):
    """Give a metric's arguments: the output or a column of it, and what is expected."""
    labels = LABELS.to(device)
    if kind == "multiclass":
        return output.softmax(1), labels
    if kind == "binary":
        return output[:, 1].sigmoid(), labels
    return output, rows(22, 2, device=device, seed=2)


@pytest.fixture
def outputs(devices):
    """Give the output of a wrapped model, a ShardedBatch, and that of the same model on one device."""
    model, bare = pair(Mlp, devices(2))
    x = rows(22, 3, device=devices(2)[0])
    sharded = model(x)
    assert isinstance(sharded, everygpu.parallel.ShardedBatch)
    return sharded, bare(x)


@pytest.mark.parametrize(("kind", "name"), cases())
def test_metric_equals_one_device(outputs, kind, name):
    found = []
    for output in outputs:
        meter = metric(kind, name).to(output.device).double()
        in_forward = meter(*arguments(kind, output, output.device))
        meter.update(*arguments(kind, output.detach(), output.device))
        found.append((in_forward, meter.compute()))
        meter.reset()
    torch.testing.assert_close(found[0], found[1], **TOLERANCE)


def test_collections_and_running_means(outputs):
    found = []
    for output in outputs:
        kinds = {n: metric("multiclass", n) for n in ("Accuracy", "F1Score", "AUROC")}
        collection = torchmetrics.MetricCollection(kinds).to(output.device)
        mean, kept = (cls().to(output.device).double() for cls in (torchmetrics.MeanMetric, torchmetrics.CatMetric))
        labels = LABELS.to(output.device)
        for _ in range(2):
            collection.update(output, labels)
            mean.update(torch.nn.functional.cross_entropy(output, labels))
            kept.update(output.detach()[:, 0])
        found.append((collection.compute(), mean.compute(), kept.compute()))
    torch.testing.assert_close(found[0], found[1], **TOLERANCE)


def test_a_metric_that_keeps_outputs_keeps_their_shards_and_is_pickled(outputs):
    meter = torchmetrics.AUROC(task="multiclass", num_classes=2).to(outputs[0].device)
    meter.update(outputs[0].detach(), LABELS.to(outputs[0].device))
    assert all(isinstance(kept, everygpu.parallel.ShardedBatch) for kept in meter.preds)
    copied = pickle.loads(pickle.dumps(meter))
    torch.testing.assert_close(copied.compute(), meter.compute(), **TOLERANCE)


def test_numpy_and_scikit_learn(outputs):
    found = []
    for output in outputs:
        plain = output.detach().cpu()
        scores, chosen = plain.softmax(1).numpy(), plain.argmax(1)
        found.append(
            [
                sklearn_metrics.accuracy_score(LABELS, chosen),
                sklearn_metrics.roc_auc_score(LABELS.numpy(), scores[:, 1]),
                sklearn_metrics.confusion_matrix(LABELS, np.asarray(chosen)).tolist(),
                sklearn_metrics.log_loss(LABELS, scores),
                np.concatenate([scores, np.array(plain)]).sum(),
                [tuple(row) for row in plain.tolist()],
            ]
        )
    for ours, theirs in zip(*found):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9)
