#!/bin/bash
# Builds every binary of the cluster, and the Debian base tree, into $LARDER_E2E_DIR. What is there already (by the hash of what it is made of) is kept.
# usage: build.sh [COMPONENT...]     components: kubernetes etcd containerd coredns helm kubeconform pause debs base buildah redis
set -euo pipefail
. "$(dirname "$0")/env.sh"
mkdir -p "$E2E/store" "$BIN"
export GOWORK=off CGO_ENABLED=0 GOFLAGS=-buildvcs=false

link() { local f; for f in "$1"/*; do ln -sfn "$f" "$BIN/${f##*/}"; done; }

gobuild() { # NAME LDFLAGS PACKAGE[=OUTPUT]...
  local name=$1 ld=$2 dir=$HERE/tools/$1 k out t p o; shift 2
  k=$({ cat "$dir"/go.mod "$dir"/main.go "$dir"/go.sum 2>/dev/null || true; go version; echo "$ld $*"; } | sha256sum | cut -c1-12)
  out=$E2E/store/$name-$k
  if [ ! -d "$out" ]; then
    t=$(now); rm -rf "$out.tmp"; mkdir -p "$out.tmp"
    local multi=()
    for p in "$@"; do
      case $p in *=*) o=${p#*=}; (cd "$dir" && go build -ldflags "-s -w $ld" -o "$out.tmp/$o" "${p%=*}");; *) multi+=("$p");; esac
    done
    [ ${#multi[@]} = 0 ] || (cd "$dir" && go build -ldflags "-s -w $ld" -o "$out.tmp/" "${multi[@]}")
    mv "$out.tmp" "$out"
    log "built $name in $(since "$t") s: $(cd "$out" && du -m --apparent-size * | awk '{printf "%s %sM, ",$2,$1}')"
  fi
  link "$out"
}

b_kubernetes() {
  local v=$K8S_VERSION c=k8s.io/kubernetes/cmd b=k8s.io/component-base/version q=k8s.io/client-go/pkg/version IFS=. maj min
  maj=${v#v}; maj=${maj%%.*}; min=${v#v*.}; min=${min%%.*}; unset IFS
  gobuild kubernetes "-X $b.gitVersion=$v -X $b.gitMajor=$maj -X $b.gitMinor=$min -X $q.gitVersion=$v -X $q.gitMajor=$maj -X $q.gitMinor=$min" \
    $c/kube-apiserver $c/kube-controller-manager $c/kube-scheduler $c/kubelet $c/kube-proxy $c/kubectl
}
b_etcd() { gobuild etcd "" go.etcd.io/etcd/server/v3=etcd; }
b_helm() { gobuild helm "-X helm.sh/helm/v4/internal/version.version=$(sed -n 's/.*helm.sh\/helm\/v4 \(v[0-9.]*\).*/\1/p' "$HERE/tools/helm/go.mod")" helm.sh/helm/v4/cmd/helm; }
b_kubeconform() { gobuild kubeconform "" github.com/yannh/kubeconform/cmd/kubeconform; }
b_containerd() { local c=github.com/containerd/containerd/v2; gobuild containerd "-X $c/version.Version=$(sed -n 's/.*containerd\/containerd\/v2 \(v[0-9.]*\).*/\1/p' "$HERE/tools/containerd/go.mod")" $c/cmd/containerd $c/cmd/ctr $c/cmd/containerd-shim-runc-v2; }
b_coredns() { gobuild coredns "" .=coredns; }
b_pause() { gobuild pause "" .=pause; }

# Debian packages that are unpacked (never installed) into a tree of their own: the node's runc, CNI plugins and iptables, and mmdebstrap.
NODE_DEBS="runc containernetworking-plugins iptables iproute2 libip4tc2 libip6tc2 libxtables12 libnftnl11 libmnl0 libnfnetlink0 libnetfilter-conntrack3 libseccomp2 libbpf1 libelf1 libbsd0 libcap2 libtirpc3"
b_debs() {
  local out t f
  out=$E2E/store/debs-$(echo "$NODE_DEBS 2" | sha256sum | cut -c1-12)
  if [ ! -d "$out" ]; then
    t=$(now); rm -rf "$out.tmp"; mkdir -p "$out.tmp/deb" "$out.tmp/node" "$out.tmp/mm"
    [ -n "$(apt-cache policy runc | sed -n 's/.*Candidate: \([0-9].*\)/\1/p')" ] || apt-get -qq update
    (cd "$out.tmp/deb" && apt-get -qq -o APT::Sandbox::User=root download $NODE_DEBS mmdebstrap) || die "apt-get download (an old package list? apt-get update)"
    for f in "$out.tmp"/deb/*.deb; do
      case $f in */mmdebstrap_*) dpkg -x "$f" "$out.tmp/mm";; *) dpkg -x "$f" "$out.tmp/node";; esac
    done
    for f in bin sbin lib lib64; do   # the base is usr-merged: a real /lib here would hide its symlink
      [ ! -d "$out.tmp/node/$f" ] || { mkdir -p "$out.tmp/node/usr/$f"; cp -a "$out.tmp/node/$f/." "$out.tmp/node/usr/$f/"; rm -rf "$out.tmp/node/$f"; }
    done
    for f in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do ln -s xtables-nft-multi "$out.tmp/node/usr/sbin/$f"; done
    rm -rf "$out.tmp/node/usr/share/doc" "$out.tmp/node/usr/share/man"
    mv "$out.tmp" "$out"
    log "unpacked Debian packages in $(since "$t") s: $(du -sm "$out/node" | cut -f1)M"
  fi
  ln -sfn "$out" "$E2E/debs"
}

# The Debian tree that is both the pods' base image and the lower layer of the nodes' root.
BASE_INCLUDE=python3,python3-venv,ca-certificates,libnuma1
b_base() {
  b_debs
  local out t
  out=$E2E/store/base-$(echo "$BASE_INCLUDE 2" | sha256sum | cut -c1-12)
  if [ ! -d "$out" ]; then
    t=$(now); rm -rf "$out.tmp"; mkdir -p "$out.tmp"
    TMPDIR=$out.tmp PATH=$E2E/debs/mm/usr/bin:$PATH mmdebstrap --quiet --mode=root --variant=minbase --include=$BASE_INCLUDE \
      --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
      --customize-hook='rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/etc/apt/sources.list*' \
      "$(. /etc/os-release; echo "$VERSION_CODENAME")" "$out.tmp/rootfs"
    tar -C "$out.tmp/rootfs" --numeric-owner --sort=name --mtime=@0 -cf "$out.tmp/layer.tar" --exclude=./dev/* .
    sha256sum "$out.tmp/layer.tar" | cut -d' ' -f1 > "$out.tmp/layer.sha256"
    mv "$out.tmp" "$out"
    log "made the Debian base in $(since "$t") s: $(du -sm "$out/layer.tar" | cut -f1)M"
  fi
  ln -sfn "$out" "$E2E/base"
}

# Packages, unpacked side by side into $E2E/NAME. What they need of the usual libraries is on every Debian with Python.
unpack() { # NAME PACKAGE...
  local name=$1 out t f; shift
  out=$E2E/store/$name-$(echo "$* 2" | sha256sum | cut -c1-12)
  if [ ! -d "$out" ]; then
    t=$(now); rm -rf "$out.tmp"; mkdir -p "$out.tmp/deb" "$out.tmp/tree"
    [ -n "$(apt-cache policy "$1" | sed -n 's/.*Candidate: \([0-9].*\)/\1/p')" ] || apt-get -qq update
    (cd "$out.tmp/deb" && apt-get -qq -o APT::Sandbox::User=root download "$@") || die "apt-get download $1 (an old package list? apt-get update)"
    for f in "$out.tmp"/deb/*.deb; do dpkg -x "$f" "$out.tmp/tree"; done
    [ ! -d "$out.tmp/tree/lib" ] || { cp -a "$out.tmp/tree/lib/." "$out.tmp/tree/usr/lib/"; rm -rf "$out.tmp/tree/lib"; }   # as above: usr-merged
    rm -rf "$out.tmp/deb" "$out.tmp/tree/usr/share/doc" "$out.tmp/tree/usr/share/man"
    mv "$out.tmp" "$out"
    log "unpacked $name in $(since "$t") s"
  fi
  ln -sfn "$out/tree" "$E2E/$name"
}
b_buildah() { unpack buildah buildah golang-github-containers-common golang-github-containers-image libgpgme11 libassuan0 libdevmapper1.02.1; }
b_redis() { unpack redis redis-server redis-tools libatomic1 libjemalloc2 liblzf1; }

t0=$(now)
for c in ${*:-kubernetes etcd containerd coredns helm pause kubeconform base buildah redis}; do b_$c; done
log "build.sh done in $(since "$t0") s; $E2E/bin: $(du -Lsm "$BIN" | cut -f1)M"
