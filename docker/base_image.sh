#!/bin/sh
# Makes a base image of Debian's packages, for machines that cannot pull one: base_image.sh TAG [SUITE]
#
# As root, with debootstrap and a Docker engine. It trusts whom this machine trusts, for package indexes behind a proxy.
set -eu
tag=$1
suite=${2:-bookworm}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$folder"
rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
cp /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/"
printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$folder/etc/pip.conf"
tar --create --directory "$folder" . | docker import --change 'CMD ["python3"]' - "$tag"
