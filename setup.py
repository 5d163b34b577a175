"""Finds the packages: `sbp.passes` and `sbp.runtime` are the top-level folders of these names.

Nothing depends on the two links in `sbp/`: in an archive from a web page, or where git makes none, they are
text files.
"""

from setuptools import find_packages, setup

FOLDERS = {"sbp": "sbp", "sbp.passes": "passes", "sbp.runtime": "runtime"}
LINKS = ["passes*", "runtime*"]

setup(
    packages=[
        package
        for name, folder in FOLDERS.items()
        for package in (name, *(f"{name}.{inner}" for inner in find_packages(folder, exclude=LINKS)))
    ],
    package_dir=FOLDERS,
)
