# All commands that a developer or CI runs. `make help` lists them.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN      := bin
# One set of flags for build, vet and lint: with different flags the Kubernetes packages would be compiled twice.
export CGO_ENABLED ?= 0
export GOFLAGS := -trimpath $(shell go env GOFLAGS)
# A go.work of a folder above does not change what we build.
export GOWORK := off
export TMPDIR := $(shell hack/tmpdir.sh)
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS  := -s -w -X cocoonstack.io/cocoon/internal/version.Version=$(VERSION)
CMDS     := cocoon cocoond capsulectl vk-cocoon epoch cocoon-manager cocoon-container-log
TOOL     := go tool -modfile=tools/go.mod

.PHONY: help
help: ## list these words
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## the Debian packages that building, checking and testing need
	@hack/setup.sh test

.PHONY: setup-demo
setup-demo:
	@hack/setup.sh demo

.PHONY: build
build: binaries guest demo-image control-plane virtctl ## all binaries, the guest kernel, the demo image, kubectl and virtctl into bin/

.PHONY: binaries
binaries:
	@mkdir -p $(BIN)
	@go build -ldflags '$(LDFLAGS)' -o $(BIN)/ $(CMDS:%=./cmd/%)

.PHONY: guest
guest: ## guest kernel and initramfs into bin/guest (cached by content)
	@guest/build.sh $(BIN)/guest

.PHONY: lvm-guest
lvm-guest: ## the machine on which volumes on a thin pool are tested, into bin/lvm (cached)
	@hack/machine/build.sh lvm $(BIN)/lvm

.PHONY: kvm-guest
kvm-guest: ## the machine with KVM in which hack/in-kvm.sh runs a program, into bin/kvm (cached)
	@hack/machine/build.sh kvm $(BIN)/kvm
	@go build -ldflags '-s -w' -o $(BIN)/kvm/in-kvm ./internal/testkit/machine/inkvm

.PHONY: hypervisors
hypervisors: ## Firecracker, Cloud Hypervisor and its firmware, from their sources by Rust, into bin/hypervisors (the first build takes some minutes, then it is cached)
	@hack/setup.sh hypervisors
	@hack/hypervisors.sh $(BIN)/hypervisors

.PHONY: nfs-server
nfs-server: ## the NFS server of the tests, into bin/nfs (cached)
	@hack/nfs/build.sh $(BIN)/nfs

.PHONY: demo-image
demo-image: guest
	@go run ./examples/demo-image -busybox $(BIN)/guest/busybox -o $(BIN)/demo.tar
	@go run ./examples/demo-image -disk $(BIN)/guest/disk.img -o $(BIN)/disk-demo.tar
	@go run ./examples/demo-image -busybox $(BIN)/guest/busybox -pause -o $(BIN)/pause.tar

.PHONY: deb
deb: binaries guest ## the Debian package bin/cocoon.deb
	@hack/deb.sh '$(VERSION)' $(BIN)/cocoon.deb

.PHONY: deb-kube-proxy
deb-kube-proxy: control-plane ## the Debian package bin/cocoon-kube-proxy.deb, for machines of Cocoon's nodes only
	@hack/deb.sh '$(VERSION)' $(BIN)/cocoon-kube-proxy.deb kube-proxy

.PHONY: os-image
os-image: binaries guest containerd ## the disk of Cocoon OS, an appliance with two system slots: bin/os/disk.raw (docs/os.md)
	@VERSION='$(VERSION)' os/build.sh $(BIN)/os

.PHONY: os-installer
os-installer: os-image ## the installer of Cocoon OS, for a stick: bin/os/installer.raw
	@VERSION='$(VERSION)' os/installer.sh $(BIN)/os

.PHONY: os-check
os-check: binaries guest containerd ## that disk and the installer built twice, and compared byte for byte
	@VERSION='$(VERSION)' os/build.sh --check $(BIN)/os
	@VERSION='$(VERSION)' os/installer.sh --check $(BIN)/os

MIN_VERSION ?=
.PHONY: os-bundle
os-bundle: os-image ## the signed update bundle bin/os/bundle-VERSION.tar of that system; OS_SIGNING_KEY is the key
	@$(BIN)/os/cache/pack bundle "$${OS_SIGNING_KEY:-$(BIN)/os/signing-key.pem}" '$(VERSION)' '$(MIN_VERSION)' $(BIN)/os $(BIN)/os/bundle-$(VERSION).tar
	@ls -l $(BIN)/os/bundle-$(VERSION).tar

.PHONY: cloudimg
cloudimg: ## a small cloud image for the tests into bin/cloudimg.qcow2 (the first build takes some minutes, then it is cached)
	@guest/cloudimg/build.sh $(BIN)/cloudimg.qcow2

.PHONY: origin
origin: ## the web server and registry of demo and e2e tests
	@mkdir -p $(BIN)
	@go build -o $(BIN)/origin ./hack/origin

.PHONY: images
images: binaries control-plane ## container images of what runs in a cluster into bin/images
	@go run ./hack/images -out $(BIN)/images cocoon-manager=$(BIN)/cocoon-manager cocoon-scheduler=$(BIN)/cocoon-up epoch=$(BIN)/epoch

.PHONY: helm
helm: ## helm, for the test of the chart
	@mkdir -p $(BIN)
	@go -C tools/helm build -ldflags '-s -w' -o $(CURDIR)/$(BIN)/helm helm.sh/helm/v4/cmd/helm

.PHONY: agent-sandbox
agent-sandbox: ## the controller of agents' sandboxes with its custom resources and rights, for its test
	@mkdir -p $(BIN)
	@go -C tools/agent-sandbox build -ldflags '-s -w' -o $(CURDIR)/$(BIN)/agent-sandbox-controller sigs.k8s.io/agent-sandbox/cmd/agent-sandbox-controller
	@cd "$$(go -C tools/agent-sandbox list -m -f '{{.Dir}}' sigs.k8s.io/agent-sandbox)/k8s" && \
		for f in crds/*.yaml *rbac.generated.yaml extensions.yaml; do echo ---; cat "$$f"; done >'$(CURDIR)/$(BIN)/agent-sandbox.yaml'

.PHONY: spiffe-csi
spiffe-csi: ## a CSI driver of others, for the test of their volumes
	@mkdir -p $(BIN)
	@go -C tools/spiffe-csi build -ldflags '-s -w' -o $(CURDIR)/$(BIN)/spiffe-csi-driver github.com/spiffe/spiffe-csi/cmd/spiffe-csi-driver

.PHONY: containerd
containerd: ## containerd, runc, crictl and critest into bin/containerd (the first build takes some minutes, then it is cached)
	@tools/containerd/build.sh $(BIN)/containerd

.PHONY: control-plane
control-plane: ## Kubernetes control plane and kubectl into bin/ (the first build takes about ten minutes, then it is cached)
	@mkdir -p $(BIN)
	@cmd/cocoon-up/build.sh $(BIN)/cocoon-up
	@for name in kubectl cocoon-scheduler; do ln -sf cocoon-up $(BIN)/$$name; done

.PHONY: virtctl
virtctl: ## KubeVirt's client, unmodified (the first build takes some minutes)
	@mkdir -p $(BIN)
	@go -C tools/virtctl build -o $(CURDIR)/$(BIN)/virtctl \
		-ldflags "-s -w -X kubevirt.io/client-go/version.gitVersion=$$(go -C tools/virtctl list -m -f '{{.Version}}' kubevirt.io/kubevirt)" \
		kubevirt.io/kubevirt/cmd/virtctl

.PHONY: check
check: lint tidy-check generate-check test-arch ## format, vet, lint, layers, docs, generated code, tidy

.PHONY: lint
lint: ## a dozen linters chosen for bugs, and the formatter
	@$(TOOL) golangci-lint fmt --diff
	@$(TOOL) golangci-lint run ./...
	@go -C hack/promlint test -count=1 . # what it reads is outside its module, which the cache of tests does not see
	@shellcheck .ci/run guest/*.sh guest/cloudimg/*.sh guest/pack/rootfs/{init,etc/boot,etc/udhcpc,etc/acpi/*/*} cmd/cocoon-up/*.sh hack/*.sh hack/host/*.sh os/*.sh os/initramfs/init hack/machine/*.sh hack/nfs/*.sh internal/app/cocoond/testdata/*.sh hack/conformance/*.sh tools/containerd/*.sh deploy/deb/{,kube-proxy/}{postinst,prerm,postrm} deploy/systemd/kube-proxy-claim deploy/testdata/*.sh internal/testkit/machine/*.sh

.PHONY: test-arch
test-arch: ## the house rules: layers and package comments
	@go test -count=1 .

.PHONY: tidy-check
tidy-check:
	@go mod tidy -diff
	@go -C tools mod tidy -diff
	@go -C tools/helm mod tidy -diff
	@go -C tools/agent-sandbox mod tidy -diff
	@go -C tools/containerd mod tidy -diff
	@go -C tools/spiffe-csi mod tidy -diff
	@go -C tools/virtctl mod tidy -diff
	@go -C hack/promlint mod tidy -diff
	@go -C hack/kwok mod tidy -diff
	@go -C hack/conformance mod tidy -diff

.PHONY: generate
generate: ## regenerate protobuf code
	@hack/generate.sh

.PHONY: generate-check
generate-check:
	@hack/generate.sh --check

.PHONY: test
test: setup test-unit test-crash test-variants ## the tests, without the longest ones of test-vm and test-e2e; like demo, it installs missing Debian packages, unless SETUP=no
	@$(MAKE) --no-print-directory test-vm test-e2e SHORT=-short

# Packages that take minutes start first. test-arch runs the house rules, which are the tests of the root folder.
PACKAGES ?= ./internal/network/bridge ./internal/snapshot/chunked ./internal/engine $(shell go list ./... | grep /cocoon/)
# Compression would take most of the time of these tests.
NORACE := github.com/klauspost/compress/...=-race=false
.PHONY: test-unit
test-unit: ## our code alone, with the race detector
	@umask 022; GORACE=atexit_sleep_ms=0 CGO_ENABLED=1 go test -race -gcflags='$(NORACE)' -vet=off -ldflags '-s -w' -p 4 -timeout 40m $(PACKAGES) # vet is in lint

.PHONY: test-crash
test-crash: ## the engine killed at every step of every operation; with the race detector, test-unit does so at every few steps
	@umask 022; CGO_ENABLED=0 go test -vet=off -ldflags '-s -w' -run '^TestKilledAtEveryStep$$' ./internal/engine

.PHONY: test-variants
test-variants: ## a few tests with another umask, locale, time zone, CPU and /tmp, and by a user with sudo
	@hack/variants.sh

.PHONY: test-vm
test-vm: binaries guest demo-image lvm-guest kvm-guest nfs-server ## real QEMU guests, taps, DHCP, rules
	@hack/test.sh vm $(SHORT)

.PHONY: test-lvm
test-lvm: binaries guest demo-image lvm-guest ## all tests of volumes on a thin pool, in a guest of their own; test-vm has the quick ones
	@COCOON_LVM_RUN="^($$(grep -hoP '^func \KTest\w+(?=\(t )' internal/volume/lvm/*_guest_test.go | paste -sd '|'))\$$" \
		go test -vet=off -tags vm -count=1 -p 1 -timeout 40m -v -run '^(TestVMThinPool|TestVMOnThinPool)$$' ./internal/volume/lvm ./internal/app/cocoond

.PHONY: test-e2e
test-e2e: build origin helm agent-sandbox spiffe-csi images cloudimg conformance-programs nfs-server ## a real control plane, real kubectl, real guests
	@hack/test.sh e2e $(SHORT)

.PHONY: test-kubevirt
test-kubevirt: build origin images cloudimg nfs-server ## all that machines of KubeVirt's API can have; test-e2e has their life; minutes
	@hack/test.sh kubevirt

.PHONY: test-upgrade
test-upgrade: build ## guests of an older build go on under this one; OLD=REV, by default the last tag
	@hack/upgrade.sh $(OLD)

.PHONY: test-host
test-host: deb demo-image ## Cocoon on a whole emulated machine with KVM, whose power is cut HOST_CRASHES times (3); 20 minutes or more
	@hack/host/build.sh $(BIN)/host
	@mkdir -p $(BIN)/host/newer
	@go build -ldflags '$(LDFLAGS)+newer' -o $(BIN)/host/newer/ $(CMDS:%=./cmd/%)
	@ln -sfn ../../guest $(BIN)/host/newer/guest
	@BIN=$(BIN)/host/newer hack/deb.sh '$(VERSION)+newer' $(BIN)/host/newer.deb
	@hack/test.sh host

.PHONY: test-hypervisors
test-hypervisors: hypervisors kvm-guest binaries guest demo-image control-plane ## Cloud Hypervisor and Firecracker, their drivers and whole nodes, and what QEMU does with KVM alone, on an emulated machine with KVM; minutes
	@hack/test.sh kvm ./internal/hypervisor/cloudhypervisor ./internal/hypervisor/firecracker
	@hack/test.sh kvm -run '^Test(LiveSave|DirtySave)$$' ./internal/hypervisor/qemu
	@hack/test.sh kvm -run '^TestVMHypervisors' ./internal/app/cocoond
	@COCOON_KVM_MEMORY=6144 hack/test.sh kvm -run '^TestScripts$$/^firecracker$$' ./test/e2e

.PHONY: bench-hypervisors
bench-hypervisors: hypervisors kvm-guest guest ## the numbers of docs/bench.md: the hypervisors side by side, on an emulated machine with KVM; minutes
	@hack/test.sh kvm -run '^TestNumbers$$' ./test/hypervisors

.PHONY: test-os
test-os: os-installer ## the image of Cocoon OS in QEMU: first start, power cut, daemon killed, restart; minutes
	@go test -vet=off -ldflags '-s -w' -tags os -count=1 -v -timeout 40m ./test/os

.PHONY: test-os-short
test-os-short: ## one start, one update and one rollback of the image of Cocoon OS, which is cached by content; minutes
	@$(MAKE) --no-print-directory os-image VERSION=v0.0.1 SOURCE_DATE_EPOCH=1 OS_ZSTD_LEVEL=3 OS_IMAGE_CACHE=yes
	@go test -vet=off -ldflags '-s -w' -tags os -count=1 -v -timeout 20m -run '^TestShort$$' ./test/os

.PHONY: bench-os
bench-os: os-image ## the numbers of docs/os.md: power on to an answer, memory, sizes, an update; minutes
	@COCOON_OS_NUMBERS=yes go test -vet=off -ldflags '-s -w' -tags os -count=1 -v -timeout 60m -run '^TestNumbers$$' ./test/os

.PHONY: replay
replay: os-installer ## each write to the boot partition of Cocoon OS, and of its installation, cut off, and what is left started; minutes
	@go test -vet=off -ldflags '-s -w' -tags replay -count=1 -v -timeout 60m ./test/replay

.PHONY: churn
churn: containerd guest demo-image binaries ## an appliance whose daemon is killed KILLS times (1000) under 50 workloads that change; most of an hour
	@COCOON_TEST_KILLS=$(or $(KILLS),1000) go test -vet=off -ldflags '-s -w' -tags cri -count=1 -v -timeout 180m -exec "$(CURDIR)/hack/alone.sh" \
		-run 'TestApplianceIsKilled$$' ./internal/app/cocoond

.PHONY: demo
demo: setup-demo build origin ## a Pod becomes a VM, before your eyes; leaves nothing behind
	@hack/demo.sh

.PHONY: up
up: build ## a cluster in ./.cocoon until Ctrl-C
	@$(BIN)/cocoon up --dir .cocoon

.PHONY: kwok
kwok: ## the node simulator that the benchmarks compare with (the first build takes some minutes)
	@go -C hack/kwok build -o ../../$(BIN)/kwok sigs.k8s.io/kwok/cmd/kwok
	@cd "$$(go -C hack/kwok list -m -f '{{.Dir}}' sigs.k8s.io/kwok)/kustomize/stage" && \
		for f in pod/fast/pod-*.yaml node/fast/node-*.yaml node/heartbeat/node-*.yaml; do echo ---; cat "$$f"; done >'$(CURDIR)/$(BIN)/kwok-stages.yaml'

.PHONY: bench
bench: build kwok agent-sandbox ## speed as ratios, measured side by side in one run
	@hack/test.sh bench

.PHONY: conformance-programs
conformance-programs:
	@hack/conformance/build.sh $(BIN)/conformance

.PHONY: conformance
conformance: build conformance-programs ## Kubernetes' conformance tests of GROUP (node,storage,cli,apps,network,auth,nodeconformance; all by default) that match FOCUS; hours
	@hack/test.sh conformance

.PHONY: critest
critest: binaries guest demo-image cloudimg control-plane containerd ## Kubernetes' tests of container runtimes that match CRITEST_FOCUS (all by default), and a kubelet, on a real containerd; minutes
	@hack/test.sh cri

.PHONY: soak
soak: build ## pods come and go while cocoond, vk-cocoon and QEMU are killed; minutes
	@hack/test.sh soak

.PHONY: clocks
clocks: binaries guest demo-image ## the clocks of 50 guests on a busy host, for a minute; about 5 minutes
	@CLOCK_GUESTS=50 CLOCK_TIME=60s hack/test.sh vm -run '^TestVMClocks$$'

.PHONY: fuzz
fuzz: ## every fuzz target for FUZZTIME (default 2m)
	@hack/fuzz.sh

.PHONY: clean
clean: ## remove bin/ (caches stay; they are keyed by content)
	@rm -rf $(BIN)
