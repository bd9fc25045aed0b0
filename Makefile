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
binaries: ## Build the scheduler, the manager, the autoscaler and the playground into bin/
	@$(GO) run ./hack/controlplane -own

.PHONY: generate
generate: tools ## Regenerate deep copies, CRDs, RBAC and protobuf code
	$(TOOLS)/buf generate
	$(TOOLS)/controller-gen object paths=./api/...
	$(TOOLS)/controller-gen crd:allowDangerousTypes=true,generateEmbeddedObjectMeta=true paths=./api/fleet/... output:crd:dir=manifests/crd/bases
	$(TOOLS)/controller-gen rbac:roleName=drover-scheduler paths=./plugins/... paths=./demand/... output:rbac:dir=manifests/scheduler
	$(TOOLS)/controller-gen rbac:roleName=drover-manager paths=./controllers/... paths=./internal/manager/... paths=./demand/... output:rbac:dir=manifests/manager
	$(TOOLS)/controller-gen rbac:roleName=drover-autoscaler paths=./autoscaler/... output:rbac:dir=manifests/autoscaler

CLUSTER_ID ?= cluster-1

.PHONY: certs
certs: ## Make the certificates of manifests/overlays/default into out/certs (CLUSTER_ID="cluster-1 cluster-2")
	$(GO) run ./hack/certs -dir out/certs $(addprefix -cluster ,$(CLUSTER_ID))

.PHONY: tools
tools: $(TOOLS)/buf $(TOOLS)/protoc-gen-go $(TOOLS)/protoc-gen-go-grpc $(TOOLS)/controller-gen

$(TOOLS)/%: hack/tools/go.mod hack/tools/go.sum
	@mkdir -p $(TOOLS)
	@echo "building $* (once; the first build takes a while)"
	@cd hack/tools && $(GO) build -o $@ $$($(GO) list -f '{{.ImportPath}}' tool | grep '/$*$$')
