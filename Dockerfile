# syntax=docker/dockerfile:1
# One build for the four programs; each is a static binary in an otherwise empty image:
#
#   docker build --target drover-scheduler   -t drover-scheduler   .
#   docker build --target drover-manager     -t drover-manager     .
#   docker build --target drover-autoscaler  -t drover-autoscaler  .
#   docker build --target drover-coordinator -t drover-coordinator .

FROM --platform=$BUILDPLATFORM golang:1.26 AS build
ARG TARGETOS=linux
ARG TARGETARCH=amd64
ENV CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN go build -trimpath -ldflags="-s -w" -o /out/drover-scheduler ./cmd/scheduler && \
    go build -trimpath -ldflags="-s -w" -o /out/drover-manager ./cmd/manager && \
    go build -trimpath -ldflags="-s -w" -o /out/drover-autoscaler ./cmd/autoscaler && \
    go build -trimpath -ldflags="-s -w" -o /out/drover-coordinator ./cmd/coordinator

FROM scratch AS base
# The system's roots, for an autoscaler whose certificate a public authority signed.
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
USER 65532:65532

FROM base AS drover-scheduler
COPY --from=build /out/drover-scheduler /drover-scheduler
ENTRYPOINT ["/drover-scheduler"]

FROM base AS drover-manager
COPY --from=build /out/drover-manager /drover-manager
ENTRYPOINT ["/drover-manager"]

FROM base AS drover-autoscaler
COPY --from=build /out/drover-autoscaler /drover-autoscaler
ENTRYPOINT ["/drover-autoscaler"]

FROM base AS drover-coordinator
COPY --from=build /out/drover-coordinator /drover-coordinator
ENTRYPOINT ["/drover-coordinator"]
