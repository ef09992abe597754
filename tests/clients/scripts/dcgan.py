"""A script in the style of DCGAN: two models, two optimizers, three backward passes a step, on made-up images."""

import argparse

import torch
from torch import nn, optim

import everygpu

LATENT, CHANNELS, SIZE = 8, 3, 16
REAL, FAKE = 1.0, 0.0


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(LATENT, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
            nn.ConvTranspose2d(8, CHANNELS, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, images):
        return self.main(images)


def init_weights(module):
    name = module.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(module.weight, 0.0, 0.1)
    elif name.find("BatchNorm") != -1:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", help="of a run without a wrapper")
    parser.add_argument("--devices", nargs="*", help="one replica each; no wrapper if left out")
    parser.add_argument("--out", required=True)
    opt = parser.parse_args()
    device = torch.device(opt.devices[0] if opt.devices else opt.device)
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)

    nets = []
    for net in (Generator().to(device), Discriminator().to(device)):
        if opt.devices:
            net = everygpu.DataParallel(everygpu.SyncBatchNorm.convert(net), opt.devices)
        net.apply(init_weights)
        nets.append(net)
    generator, discriminator = nets

    criterion = nn.BCELoss()
    fixed_noise = torch.randn(6, LATENT, 1, 1).to(device)
    update_d = optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    update_g = optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))

    for step in range(4):
        real = torch.randn(7, CHANNELS, SIZE, SIZE).tanh().to(device)
        label = torch.full((real.size(0),), REAL, device=device)
        discriminator.zero_grad()
        output = discriminator(real).view(-1)
        loss_real = criterion(output, label)
        loss_real.backward()
        d_x = output.mean().item()

        fake = generator(torch.randn(real.size(0), LATENT, 1, 1).to(device))
        label.fill_(FAKE)
        loss_fake = criterion(discriminator(fake.detach()).view(-1), label)
        loss_fake.backward()
        update_d.step()

        generator.zero_grad()
        label.fill_(REAL)
        output = discriminator(fake).view(-1)
        loss_g = criterion(output, label)
        loss_g.backward()
        update_g.step()
        loss_d = loss_real + loss_fake
        print(f"[{step}] {loss_d.item():.9f} {loss_g.item():.9f} {d_x:.9f} {output.mean().item():.9f}")

    with torch.no_grad():
        images = generator(fixed_noise).detach().cpu()
    print(f"images {tuple(images.shape)} {images.double().std().item():.9f}")
    torch.save(generator.state_dict(), f"{opt.out}/generator.pth")
    torch.save(discriminator.state_dict(), f"{opt.out}/discriminator.pth")


if __name__ == "__main__":
    try:
        main()
    finally:
        torch.set_default_dtype(torch.float32)
