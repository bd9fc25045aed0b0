# Two commands do everything on a fresh machine: `make demo` and `make test`.

GO     ?= go
BIN    := $(CURDIR)/bin
TOOLS  := $(BIN)/tools
export PATH := $(TOOLS):$(PATH)

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: control-plane binaries ## Build what is missing, start everything and play the stories
	@$(BIN)/playground demo

.PHONY: control-plane
control-plane: ## Build etcd, the API server and the rest of the control plane (once)
	@$(GO) run ./hack/controlplane

.PHONY: binaries
binaries: ## Build the scheduler, the manager, the autoscaler, the coordinator, the sample controller and the playground into bin/
	@$(GO) run ./hack/controlplane -own

GOTESTSUM := $(TOOLS)/gotestsum --format pkgname --format-hide-empty-pkg --hide-summary skipped --

# Suites that start whole clusters run one after the other, the rest side by side.
CLUSTERS := ./test/... ./playground/...
UNITS     = $(shell $(GO) list ./... | grep -v -e /drover/test/ -e /drover/playground)

.PHONY: test
test: control-plane binaries $(TOOLS)/gotestsum ## Vet, unit tests, and the whole on a real control plane
	$(GO) vet ./...
	$(GOTESTSUM) -timeout 20m $(UNITS)
	$(GOTESTSUM) -timeout 40m -p 1 $(CLUSTERS)

# Packages with goroutines. What links the scheduler is built once more for it, which takes minutes.
RACE := ./api/... ./capacity/... ./sharding/... ./demand/... ./transport/... ./autoscaler/... ./controllers/... \
	./internal/process/... ./internal/link/... ./internal/manager/... ./internal/coordinator/... ./kueue/admission/... ./kueue/provisioning/... ./plugins/... ./examples/...

.PHONY: test-race
test-race: control-plane $(TOOLS)/gotestsum ## The packages with goroutines under the race detector
	@command -v gcc >/dev/null || { echo "installing gcc, which the race detector needs"; apt-get update -qq && apt-get install -y -qq gcc libc6-dev; }
	CGO_ENABLED=1 $(GOTESTSUM) -race -timeout 30m $(RACE)

.PHONY: bench
bench: control-plane ## Benchmarks; figures are ratios measured in one run
	$(GO) test -run '^$$' -bench . -benchtime 1x -timeout 60m ./bench/...

.PHONY: lint
lint: $(TOOLS)/golangci-lint ## golangci-lint
	$(TOOLS)/golangci-lint run ./...

.PHONY: vuln
vuln: $(TOOLS)/govulncheck ## Known vulnerabilities; needs the vulnerability database's host
	$(TOOLS)/govulncheck ./...

.PHONY: verify
verify: tools ## Fail when generated files, go.mod or formatting are stale
	hack/verify.sh

.PHONY: generate
generate: tools ## Regenerate deep copies, CRDs, RBAC and protobuf code
	$(TOOLS)/buf generate
	$(TOOLS)/controller-gen object paths=./api/... paths=./examples/...
	$(TOOLS)/controller-gen crd:allowDangerousTypes=true,generateEmbeddedObjectMeta=true paths=./api/fleet/... paths=./api/loadbalance/... output:crd:dir=manifests/crd/bases
	$(TOOLS)/controller-gen rbac:roleName=drover-scheduler paths=./plugins/capacityrequest/... paths=./demand/... output:rbac:dir=manifests/scheduler
	$(TOOLS)/controller-gen rbac:roleName=drover-scheduler-vnaffinity paths=./plugins/vnaffinity/... output:rbac:dir=manifests/vnaffinity
	$(TOOLS)/controller-gen rbac:roleName=drover-manager paths=./controllers/rollup/... paths=./controllers/backstop/... paths=./internal/manager/... paths=./demand/... output:rbac:dir=manifests/manager
	$(TOOLS)/controller-gen rbac:roleName=drover-manager-kueue paths=./kueue/... output:rbac:dir=manifests/kueue
	$(TOOLS)/controller-gen rbac:roleName=drover-coordinator paths=./controllers/watchgroup/... paths=./internal/coordinator/... output:rbac:dir=manifests/watchgroup
	$(TOOLS)/controller-gen rbac:roleName=drover-autoscaler paths=./autoscaler/... output:rbac:dir=manifests/autoscaler
	$(TOOLS)/controller-gen crd paths=./examples/parentchild/api/... output:crd:dir=examples/parentchild/crd
	$(TOOLS)/controller-gen rbac:roleName=parentchild-controller paths=./examples/parentchild/controller/... output:rbac:dir=examples/parentchild/rbac/controller
	$(TOOLS)/controller-gen rbac:roleName=parentchild-creation paths=./examples/parentchild/creation/... output:rbac:dir=examples/parentchild/rbac/creation

CLUSTER_ID ?= cluster-1

.PHONY: certs
certs: ## Make the certificates of manifests/overlays/default into out/certs (CLUSTER_ID="cluster-1 cluster-2")
	$(GO) run ./hack/certs -dir out/certs $(addprefix -cluster ,$(CLUSTER_ID))

.PHONY: tools
tools: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc $(TOOLS)/controller-gen

# Where each tool of hack/tools/go.mod is built from. By name, so that one tool does not fetch the modules of all.
TOOL_buf                := github.com/bufbuild/buf/cmd/buf
TOOL_golangci-lint      := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
TOOL_govulncheck        := golang.org/x/vuln/cmd/govulncheck
TOOL_benchstat          := golang.org/x/perf/cmd/benchstat
TOOL_gotestsum          := gotest.tools/gotestsum
TOOL_protoc-gen-go      := google.golang.org/protobuf/cmd/protoc-gen-go
TOOL_protoc-gen-go-grpc := google.golang.org/grpc/cmd/protoc-gen-go-grpc
TOOL_controller-gen     := sigs.k8s.io/controller-tools/cmd/controller-gen

$(TOOLS)/%: hack/tools/go.mod hack/tools/go.sum
	@mkdir -p $(TOOLS)
	@echo "building $* (once; the first build takes a while)"
	@cd hack/tools && $(GO) build -o $@ $(TOOL_$*)
