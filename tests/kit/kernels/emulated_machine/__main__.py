"""Builds the machine and runs it: see the package."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from blockyard_kernels.cpu.build import INSTRUCTION_SETS, SOURCES, build, find_compiler

HERE = Path(__file__).parent
KERNEL_SUITE = "bookworm"
EMULATOR_SUITE = "trixie"
"""The first that has a Bochs with AMX."""
EMULATOR_OPTIONS = (
    *("--enable-cpu-level=6", "--enable-x86-64", "--enable-fpu", "--enable-avx", "--enable-evex", "--enable-amx"),
    *("--enable-memtype", "--enable-all-optimizations", "--with-nogui", "--disable-docbook"),
)
# Bochs has short string moves without the fast ones that they are built on, which Linux believes; and its system
# management mode fails with Linux' control registers, which ACPI would enter.
KERNEL_OPTIONS = "console=ttyS0 quiet acpi=off clearcpuid=fsrm"
DYNAMIC_LINKER = "ld-linux-x86-64.so.2"
SILENCE_SECONDS = 300
CYLINDER_BYTES = 16 * 63 * 512


@dataclass(frozen=True, slots=True)
class Suite:
    """A release of Debian, with its own lists of packages in a folder."""

    name: str
    folder: Path

    def update(self) -> None:
        """Fetches the lists."""
        (self.folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (self.folder / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        (self.folder / "status").touch()
        archive = (
            f"[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian {self.name} main"
        )
        (self.folder / "sources.list").write_text(f"deb {archive}\ndeb-src {archive}\n")
        settings = {
            "Dir::State::Lists": "lists",
            "Dir::State::status": "status",
            "Dir::Cache": "",
            "Dir::Etc::SourceList": "sources.list",
            "Dir::Etc::SourceParts": "none",
        }
        lines = [f'{key} "{self.folder / value}";' for key, value in settings.items()]
        (self.folder / "apt.conf").write_text("\n".join([*lines, 'APT::Sandbox::User "";']))
        self._run("apt-get", "-qq", "update")

    def dependency(self, package: str) -> str:
        """Finds the first package that one depends on."""
        lines = self._run("apt-cache", "depends", package).splitlines()
        return next(line.split()[1] for line in lines if line.strip().startswith("Depends:"))

    def unpack(self, *packages: str) -> Path:
        """Fetches packages and unpacks them into a folder of the suite."""
        self._run("apt-get", "-qq", "download", *packages)
        for path in self.folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", path, self.folder / "root"], check=True)
        return self.folder / "root"

    def unpack_source(self, package: str) -> Path:
        """Fetches a package's source as its authors published it, and unpacks that."""
        self._run("apt-get", "-qq", "source", "--download-only", "--tar-only", package)
        with tarfile.open(next(self.folder.glob("*.orig.tar.*"))) as archive:
            archive.extractall(self.folder / "source", filter="data")
        return next((self.folder / "source").iterdir())

    def _run(self, *command: str) -> str:
        environment = {**os.environ, "APT_CONFIG": str(self.folder / "apt.conf")}
        return subprocess.run(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout


def build_parts(folder: Path) -> None:
    """Builds what does not depend on our kernels: the emulator, its BIOS, Linux and what loads it."""
    emulator, kernel = Suite(EMULATOR_SUITE, folder / "emulator"), Suite(KERNEL_SUITE, folder / "kernel")
    for suite in (emulator, kernel):
        suite.update()
    bios = emulator.unpack("bochsbios", "vgabios") / "usr/share"
    (bios / "bochs/BIOS-bochs-latest").rename(folder / "bios")
    (bios / "vgabios/vgabios.bin").rename(folder / "vgabios")
    root = kernel.unpack(kernel.dependency("linux-image-cloud-amd64"), "grub-pc-bin", "grub-common")
    next((root / "boot").glob("vmlinuz-*")).rename(folder / "vmlinuz")
    grub = root / "usr/lib/grub/i386-pc"
    (folder / "grub.cfg").write_text(f"set root=(hd1)\nlinux /vmlinuz {KERNEL_OPTIONS}\ninitrd /initrd\nboot\n")
    command = [root / "usr/bin/grub-mkimage", "-d", grub, "-O", "i386-pc", "-p", "/", "-c", folder / "grub.cfg"]
    subprocess.run([*command, "-o", folder / "loader", "biosdisk", "tar", "linux"], check=True)
    write_disk(folder / "loader.disk", (grub / "boot.img").read_bytes() + (folder / "loader").read_bytes())
    source = emulator.unpack_source("bochs")
    subprocess.run(["patch", "-p1", "-i", HERE / "bochs.patch"], cwd=source, check=True)
    for command in (["./configure", *EMULATOR_OPTIONS, "CXXFLAGS=-O2"], ["make", "-j", str(os.cpu_count())]):
        with (folder / "build.log").open("a") as log:
            subprocess.run(command, cwd=source, stdout=log, stderr=log, check=True)
    (source / "bochs").rename(folder / "bochs")


def write_disk(path: Path, content: bytes) -> None:
    """Writes a disk of whole cylinders."""
    path.write_bytes(content + bytes(-len(content) % CYLINDER_BYTES))


def write_programs(folder: Path, compiler: str) -> None:
    """Writes the disk of Linux and its first files: the checks, our libraries, and those that they are linked to."""
    init = folder / "init"
    flags = ("-O2", "-std=c++17", "-pthread", "-ffp-contract=off", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
    flags = (
        *flags,
        *INSTRUCTION_SETS["amx"],
        f"-I{SOURCES}",
        f"-Wl,--dynamic-linker=/{DYNAMIC_LINKER},-rpath,/,--disable-new-dtags",
    )
    subprocess.run([compiler, *flags, "-o", init, HERE / "init.cpp"], check=True)
    libraries = build(compiler, ["amx", "amx_emulated"])
    paths = {path.name: path for path in (init, *libraries)}
    linked = subprocess.run(["ldd", libraries[0]], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    paths |= {Path(word).name: Path(word) for word in linked if word.startswith("/")}
    (folder / "initrd").write_bytes(cpio_archive({name: path.read_bytes() for name, path in paths.items()}))
    with tarfile.open(folder / "files.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("vmlinuz", "initrd"):
            archive.add(folder / name, name)
    write_disk(folder / "files.disk", (folder / "files.tar").read_bytes())


def cpio_archive(files: dict[str, bytes]) -> bytes:
    """Lays executable files out as Linux reads its first ones."""
    archive = b""
    for number, (name, content) in enumerate([*files.items(), ("TRAILER!!!", b"")]):
        fields = (number, 0o100755, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        header = ("070701" + "".join(f"{field:08x}" for field in fields) + name + "\0").encode()
        for part in (header, content):
            archive += part + bytes(-len(part) % 4)
    return archive


def run_machine(folder: Path) -> bool:
    """Boots, and prints what the machine says until its verdict; returns whether that is good."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(SILENCE_SECONDS)
        settings = (
            "cpu: model=sapphire_rapids, ips=10000000, ignore_bad_msrs=1",
            "memory: guest=512, host=512",
            f"romimage: file={folder / 'bios'}",
            f"vgaromimage: file={folder / 'vgabios'}",
            "display_library: nogui",
            f"ata0-master: type=disk, path={folder / 'loader.disk'}",
            f"ata0-slave: type=disk, path={folder / 'files.disk'}",
            "boot: disk",
            f"com1: enabled=1, mode=socket-client, dev=127.0.0.1:{server.getsockname()[1]}",
            "clock: sync=none",
            f"log: {folder / 'bochs.log'}",
            "panic: action=fatal",
        )
        (folder / "bochsrc").write_text("\n".join(settings) + "\n")
        for lock in folder.glob("*.disk.lock"):
            lock.unlink()
        with subprocess.Popen([folder / "bochs", "-q", "-f", folder / "bochsrc"], stdout=subprocess.DEVNULL) as machine:
            try:
                connection, _ = server.accept()
                connection.settimeout(SILENCE_SECONDS)
                with connection, connection.makefile(errors="replace") as lines:
                    for line in lines:
                        sys.stdout.write(line)
                        sys.stdout.flush()
                        if line.startswith("verdict:"):
                            return "passed" in line
                return False
            finally:
                machine.kill()


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser("emulated_machine")
    parser.add_argument("--folder", type=Path, help="where the parts are kept")
    folder: Path | None = parser.parse_args().folder
    compiler = find_compiler()
    if compiler is None:
        parser.error("no C++ compiler")
    with tempfile.TemporaryDirectory(prefix="emulated-machine-") as temporary:
        place = (folder or Path(temporary)).resolve()
        if not (place / "bochs").exists():
            build_parts(place)
        write_programs(place, compiler)
        return 0 if run_machine(place) else 1


if __name__ == "__main__":
    sys.exit(main())
