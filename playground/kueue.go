package playground

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	autoscalingv1 "k8s.io/autoscaler/cluster-autoscaler/apis/provisioningrequest/autoscaling.x-k8s.io/v1"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"

	"github.com/drover-sh/drover/internal/kueuemanager"
)

// ErrNoKueue is returned where Kueue would have to be started in a playground that belongs to another process.
var ErrNoKueue = errors.New("the playground that is up runs without Kueue: end it and start it with `playground up --kueue`")

// kueueDir is where the Kueue manager's configuration, certificates and logs are.
func (p *Playground) kueueDir() string { return filepath.Join(p.dir, "kueue") }

// HasKueue says whether the Kueue manager runs.
func (p *Playground) HasKueue() bool { return p.hasKueue }

// EnableKueue starts the Kueue manager, and the manager anew with kueue.enabled. It does nothing where Kueue runs; in
// another process's playground it returns ErrNoKueue. ctx bounds the start only.
func (p *Playground) EnableKueue(ctx context.Context) error {
	if p.hasKueue {
		return nil
	}
	if p.group == nil {
		return ErrNoKueue
	}
	begin := time.Now()
	if err := p.startKueue(ctx); err != nil {
		return err
	}
	if err := p.writeConfigs(); err != nil {
		return err
	}
	p.present.Busy("starting " + Manager)
	if err := p.Restart(ctx, Manager); err != nil {
		return err
	}
	if err := p.view.followKueue(ctx); err != nil {
		return err
	}
	p.present.Say("\nKueue up in %.1fs, a process of its own, and %s serves it (kueue.enabled). Log: %s",
		time.Since(begin).Seconds(), Manager, p.kueue.LogFile())
	return nil
}

func (p *Playground) startKueue(ctx context.Context) (err error) {
	p.present.Busy("starting kueue")
	p.kueueInstalled = true // in part, if it fails
	p.kueue, err = kueuemanager.Start(ctx, p.cp, kueuemanager.Options{Dir: p.kueueDir()})
	p.hasKueue = err == nil
	return err
}

// stopKueue ends the Kueue manager. A control plane that is not ours goes on without its webhooks.
func (p *Playground) stopKueue() error {
	if !p.kueueInstalled {
		return nil
	}
	var errs []error
	if p.kueue != nil {
		errs = append(errs, p.kueue.Stop())
	}
	if !p.ownCP {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		errs = append(errs, kueuemanager.Uninstall(ctx, p.cp))
	}
	return errors.Join(errs...)
}

// followKueue makes the view watch Kueue's objects, too; their kinds have to be installed.
func (v *view) followKueue(ctx context.Context) error {
	return v.follow(ctx, &kueue.Workload{}, &kueue.AdmissionCheck{}, &autoscalingv1.ProvisioningRequest{})
}

// awaitChecks waits until the AdmissionChecks are Active: a queue whose check is not admits nothing.
func (s *Stage) awaitChecks(names ...string) {
	for _, name := range names {
		s.Await("admission check "+name+" is Active", func(w *World) (bool, string) {
			check := w.AdmissionCheck(name)
			if check == nil {
				return false, "no such check"
			}
			c := apimeta.FindStatusCondition(check.Status.Conditions, kueue.AdmissionCheckActive)
			if c == nil {
				return false, "no condition"
			}
			return c.Status == metav1.ConditionTrue, fmt.Sprintf("%s: %s", c.Reason, c.Message)
		})
	}
}
