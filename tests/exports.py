"""The public names: those of ``everygpu``, and those that only its packages have, such as ``parallel.scatter``."""

import everygpu

PACKAGES = ("devices", "parallel", "step")

EXPORTS = {name: getattr(everygpu, name) for name in everygpu.__all__} | {
    f"{package}.{name}": getattr(getattr(everygpu, package), name)
    for package in PACKAGES
    for name in getattr(everygpu, package).__all__
    if name not in everygpu.__all__
}
