from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["dist_train", "dist_train.*"]), "dist_train.configs"],
    package_dir={"dist_train.configs": "configs"},
    package_data={"dist_train.configs": ["*.yaml", "*/*.yaml"]},
)
