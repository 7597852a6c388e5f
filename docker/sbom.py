"""Generator of an SBOM (CycloneDX 1.6 in JSON) of an image's Python environment, or in a wheel as in PEP 770:

    python docker/sbom.py SITE_PACKAGES FILE.json
    python docker/sbom.py npuserve-VERSION-….whl

Needs cyclonedx-python-lib and packaging, in an environment beside the image's. System packages of the base image are
not included. A wheel's SBOM lists the compiled library, and the dependencies that the wheel's metadata name.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import tempfile
import zipfile
from importlib.metadata import Distribution, PathDistribution, distributions
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "npuserve"
LIBRARY = "npuserve/kernels/native/libnpuserve.so"


def component(package: Distribution) -> Component:
    """Return the component of an installed package."""
    name, licence = canonicalize_name(package.name), package.metadata.get("License-Expression")
    url = PackageURL("pypi", name=name, version=package.version)
    return Component(name=name, version=package.version, purl=url, bom_ref=str(url),
                     type=ComponentType.APPLICATION if name == NAME else ComponentType.LIBRARY,
                     licenses=[LicenseExpression(licence)] if licence else [])


def of_environment(folder: Path) -> Bom:
    """Return the SBOM of a folder of installed packages, including npuserve, with their dependencies."""
    packages = {canonicalize_name(package.name): package for package in distributions(path=[str(folder)])}
    components = {name: component(package) for name, package in packages.items()}
    if NAME not in components:
        raise SystemExit(f"{folder}: {NAME} is not installed there")
    bom = Bom(components=[made for name, made in components.items() if name != NAME])
    bom.metadata.component = components[NAME]
    for name, package in packages.items():
        asked = map(Requirement, package.requires or [])
        # Markers are ignored: an installed package that is required is a dependency.
        needed = sorted({canonicalize_name(made.name) for made in asked} & components.keys() - {name})
        bom.register_dependency(components[name], [components[other] for other in needed])
    return bom


def add_to_wheel(wheel: Path) -> str:
    """Add the SBOM to the wheel, replacing the file, and return its name in the wheel."""
    with zipfile.ZipFile(wheel) as source, tempfile.NamedTemporaryFile(dir=wheel.parent, suffix=".whl") as file:
        records = [entry for entry in source.infolist() if entry.filename.endswith(".dist-info/RECORD")]
        folder = records[0].filename.removesuffix("RECORD")
        name = f"{folder}sboms/{NAME}.cdx.json"
        if name in source.namelist():
            raise SystemExit(f"{wheel}: has an SBOM already")
        bom = Bom()
        bom.metadata.component = component(PathDistribution(zipfile.Path(source, folder)))
        if LIBRARY in source.namelist():
            digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(source.read(LIBRARY)).hexdigest())
            bom.components.add(Component(name=LIBRARY, type=ComponentType.FILE, hashes=[digest], bom_ref=LIBRARY))
            bom.register_dependency(bom.metadata.component, list(bom.components))
        text = JsonV1Dot6(bom).output_as_string(indent=2).encode()
        checksum = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
        with zipfile.ZipFile(file.name, "w", zipfile.ZIP_DEFLATED) as target:
            for entry in source.infolist():
                if entry not in records:
                    target.writestr(entry, source.read(entry), zipfile.ZIP_DEFLATED)
            target.writestr(name, text)
            target.writestr(records[0], source.read(records[0]) + f"{name},sha256={checksum},{len(text)}\n".encode())
        shutil.copyfile(file.name, wheel)  # keeps the mode of the wheel
    return name


def main(arguments: list[str]) -> None:
    if len(arguments) == 1:
        print(add_to_wheel(Path(arguments[0])))
    elif len(arguments) == 2:
        Path(arguments[1]).write_text(JsonV1Dot6(of_environment(Path(arguments[0]))).output_as_string(indent=2) + "\n")
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
