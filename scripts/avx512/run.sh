#!/bin/bash
# run.sh [TEST-FLAG...]
#
# Runs the kernel tests, in short form, on an emulated computer with AVX-512: a Debian kernel under Bochs, whose CPU is a
# Skylake-X, with the test binary in its initial RAM disk. Takes a minute or two, and a minute more the first time. Exits with the
# status of the tests.
#
# Everything but Go comes from Debian packages, which are unpacked into CACHE and not installed. So it needs Linux on x86-64, root or
# user namespaces (for chroot and unshare), apt-get, dpkg, Debian's archive keyring, and a mirror.
#
# TEST-FLAGs replace the default ones below; they cannot contain blanks. Environment: CACHE, a folder (default build/avx512); LIMIT, seconds
# until it gives up (600); MIRROR (http://deb.debian.org/debian).
set -euo pipefail

suite=trixie     # the first Debian whose Bochs has right AVX-512 state and right double FMA
bochs=3.0        # upstream version; another one is refused, since what it gets wrong is known for this one
cpu=corei7_skylake_x
required=generic,avx2,avx512

here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
cache=${CACHE:-$repository/build/avx512}
mirror=${MIRROR:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
# The skipped test is of the CPU: this Bochs gets VRSQRT14PS wrong at odd powers of two. TestNewtonIsItsFormula runs all the same.
[ $# -gt 0 ] || set -- -test.short -test.skip=TestEstimatedIsWithinOneULP/avx512/newton

fail() { echo "run.sh: $*" >&2; exit 1; }

[ "$(uname -sm)" = "Linux x86_64" ] || fail "needs Linux on x86-64"
for tool in apt-get dpkg go cpio gzip unshare timeout; do
  command -v "$tool" > /dev/null || fail "needs $tool"
done
apart=(unshare --net)
[ "$(id -u)" = 0 ] || apart+=(--user --map-root-user)
"${apart[@]}" true || fail "needs root or user namespaces"
[ -f "$keyring" ] || fail "needs the package debian-archive-keyring"

# unpack fetches packages and what they depend on, for a system in which nothing is installed, and unpacks them into folder $1.
unpack() {
  local root=$1 apt=$cache/apt; shift
  rm -rf "$root" "$apt"
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$apt"/{etc/apt.conf.d,etc/preferences.d,lists/partial,archives/partial}
  for folder in bin sbin lib lib64; do ln -s "usr/$folder" "$root/$folder"; done
  : > "$apt/status"
  echo "deb [signed-by=$keyring] $mirror $suite main" > "$apt/etc/sources.list"
  local options=(-qq -o "Dir::Etc=$apt/etc" -o "Dir::State=$apt" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt"
    -o APT::Architecture=amd64 -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=2 -o Acquire::http::Timeout=30)
  apt-get "${options[@]}" update >&2 || return 1
  apt-get "${options[@]}" -y --no-install-recommends --download-only install "$@" >&2 || return 1
  for package in "$apt"/archives/*.deb; do dpkg -x "$package" "$root" || return 1; done
  rm -rf "$apt" "$root"/usr/share/{doc,icons,locale,man}
}

root=$cache/root
if [ ! -e "$root/complete" ]; then
  echo "run.sh: fetching Bochs and a kernel from $mirror" >&2
  mkdir -p "$cache"
  unpack "$root" "bochs=$bochs+*" bochs-term isolinux syslinux-common xorriso linux-image-cloud-amd64 ||
    fail "could not fetch the packages of Debian $suite from $mirror"
  : > "$root/complete"
fi

# The RAM disk: the tests, and the first process, which runs them.
work=$(mktemp -d "$root/tmp/run.XXXXXX")
trap 'rm -rf "$work"' EXIT
inside=${work#"$root"} # as seen after chroot
mkdir -p "$work"/disk/{dev,proc,tmp} "$work/iso"
export CGO_ENABLED=0 GOOS=linux GOARCH=amd64
(cd "$here/init" && go build -buildvcs=false -ldflags="-s -w" -o "$work/disk/init" .)
(cd "$repository" && go test -c -buildvcs=false -ldflags="-s -w" -o "$work/disk/test" ./kernel)
(cd "$work/disk" && find . | cpio --quiet -o -H newc | gzip -1 > "$work/iso/disk.gz")

# The boot medium. The kernel makes an environment variable for the first process of every name that it does not know. It is told
# to leave out what takes long under emulation or does not work there: compact XSAVE, several processors, the time stamp counter's
# calibration. A second in there is 50 million instructions, whatever the clock here says: so the tests have no timeout.
cp "$root"/boot/vmlinuz-* "$work/iso/vmlinuz"
cp "$root/usr/lib/ISOLINUX/isolinux.bin" "$root/usr/lib/syslinux/modules/bios/ldlinux.c32" "$work/iso/"
cat > "$work/iso/isolinux.cfg" << END
default test
prompt 0
label test
 kernel /vmlinuz
 append initrd=/disk.gz console=ttyS1 quiet panic=-1 nokaslr mitigations=off clearcpuid=xsaves,xsavec nosmp noapic nolapic tsc=unstable clocksource=jiffies lpj=200000 cryptomgr.notests random.trust_cpu=on ROUNDPIPE_GO_REQUIRE_BACKENDS=$required TEST_FLAGS="-test.timeout=0 $*"
END
"${apart[@]}" chroot "$root" /usr/bin/xorriso -as mkisofs -quiet -o "$inside/boot.iso" -b isolinux.bin -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$inside/iso" 2> /dev/null || fail "could not write the boot medium"

# The computer. Its first serial line is the tests' output, its second the kernel's.
cat > "$work/bochsrc" << END
config_interface: textconfig
display_library: rfb, options="timeout=0"
cpu: model=$cpu, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest=512, host=512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path=$inside/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$inside/output
com2: enabled=1, mode=file, dev=$inside/console
clock: sync=none
log: $inside/log
panic: action=fatal
error: action=ignore
info: action=ignore
END
printf 'c\nquit\n' > "$work/debugger" # Debian's Bochs starts in its debugger
: > "$work/output"
: > "$work/console"
# Without a network of its own, the display would listen on every address of this machine.
timeout -k 5 "${LIMIT:-600}" "${apart[@]}" chroot "$root" /usr/bin/bochs-bin -q -f "$inside/bochsrc" -rc "$inside/debugger" \
  > "$work/bochs" 2>&1 < /dev/null || true

tr -d '\r' < "$work/output" | sed '/^status /d'
status=$(tr -d '\r' < "$work/output" | sed -n 's/^status //p')
if [ -z "$status" ]; then
  tail -n 20 "$work/console" "$work/bochs" >&2
  fail "the emulated computer did not finish within ${LIMIT:-600} seconds"
fi
[ "$status" = 0 ] || exit 1
