package kueuetest

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/drover-sh/drover/internal/kueuemanager"
)

// Options says how Kueue runs.
type Options = kueuemanager.Options

// Manager is a running Kueue manager.
type Manager = kueuemanager.Manager

// Start is kueuemanager.Start.
func Start(ctx context.Context, cluster kueuemanager.Cluster, o Options) (*Manager, error) {
	return kueuemanager.Start(ctx, cluster, o)
}

// Uninstall is kueuemanager.Uninstall.
func Uninstall(ctx context.Context, cluster kueuemanager.Cluster) error {
	return kueuemanager.Uninstall(ctx, cluster)
}

// Scheme is kueuemanager.Scheme.
func Scheme() *runtime.Scheme { return kueuemanager.Scheme() }
