"""GPyTorch's MultiDeviceKernel, which inherits from DataParallel and calls its four verbs itself."""

import pytest
import torch

import everygpu
from tests.clients.replacing import load_again

gpytorch = pytest.importorskip("gpytorch")


@pytest.fixture
def MultiDeviceKernel(monkeypatch):
    return load_again("gpytorch.kernels.multi_device_kernel", monkeypatch).MultiDeviceKernel


class ExactGP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood, wrap):
        super().__init__(x, y, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = wrap(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def data(device, num_rows=41):
    x = torch.linspace(0, 1, num_rows, dtype=torch.float64, device=device).unsqueeze(1)
    return x, (x * 6).sin().squeeze(1)


def fit(wrap, device, num_steps=8):
    """Return losses, parameters and predictions of an exact regression."""
    x, y = data(device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = ExactGP(x, y, likelihood, wrap).double().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    losses = []
    model.train()
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    model.eval()
    with torch.no_grad():
        predicted = likelihood(model(data(device, 13)[0]))
    return losses, [p.detach() for p in model.parameters()], predicted.mean, predicted.variance


def test_kernel_is_both(MultiDeviceKernel, devices):
    kernel = MultiDeviceKernel(gpytorch.kernels.RBFKernel(), devices(2))
    assert isinstance(kernel, everygpu.DataParallel)
    assert isinstance(kernel, gpytorch.kernels.Kernel)
    assert kernel.base_kernel is kernel.module


@pytest.mark.parametrize("num_rows", [2, 3, 20, 21])
def test_covariance_equals_one_device(MultiDeviceKernel, devices, num_rows):
    base = gpytorch.kernels.RBFKernel().double().to(devices(2)[0])
    x, _ = data(devices(2)[0], num_rows)
    kernel = MultiDeviceKernel(base, devices(2), output_device=devices(2)[0])
    found, expected = kernel(x).to_dense(), base(x).to_dense()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kernel(x, diag=True), base(x, diag=True), rtol=1e-9, atol=1e-9)


def test_regression_equals_one_device(MultiDeviceKernel, devices):
    chosen = devices(2)

    def wrap(base):
        return MultiDeviceKernel(base, chosen, output_device=chosen[0])

    expected = fit(lambda base: base, chosen[0])
    torch.testing.assert_close(fit(wrap, chosen[0]), expected, rtol=1e-6, atol=1e-6)
    assert expected[0][0] > expected[0][-1]
