package playground

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// ErrStoryFailed is returned when a story has failed; the presenter has told which and why.
var ErrStoryFailed = errors.New("a story has failed")

// Demo starts a playground, plays stories, and stops it.
func Demo(ctx context.Context, presenter Presenter, stories []Story) error {
	presenter.Say("Drover: a scheduling failure becomes a node. Everything below runs for real, in separate processes on this machine.")
	err := withOwn(ctx, Options{Presenter: presenter}, func(p *Playground) error { return p.playAll(ctx, stories) })
	if err == nil {
		presenter.Say("\n%s", next("all"))
	}
	return err
}

// RunStories plays stories on the playground that is up, or on one of their own.
func RunStories(ctx context.Context, presenter Presenter, stories []Story) error {
	return withAny(ctx, presenter, func(p *Playground) error { return p.playAll(ctx, stories) })
}

// Up keeps a playground running until ctx ends, with Kueue if that is wanted.
func Up(ctx context.Context, presenter Presenter, kueue bool) error {
	return withOwn(ctx, Options{Presenter: presenter, Shared: true, Kueue: kueue}, func(p *Playground) error {
		p.table(ctx, "get", "availablecapacity", "-A")
		after := "up"
		if kueue {
			after = "up --kueue"
		}
		presenter.Say("\nexport KUBECONFIG=%s\n\n%s\n\nCtrl-C, or `bin/playground down`, ends it.", p.Kubeconfig(), next(after))
		<-ctx.Done()
		return nil
	})
}

// withOwn starts a playground, and stops it whatever happens.
func withOwn(ctx context.Context, o Options, do func(*Playground) error) error {
	presenter := o.Presenter
	p, err := Start(ctx, o)
	if err != nil {
		presenter.Done()
		return err
	}
	err = do(p)
	presenter.Busy("stopping")
	if stopErr := p.Stop(); stopErr != nil {
		err = errors.Join(err, fmt.Errorf("stopping: %w", stopErr))
	}
	presenter.Done()
	return err
}

// withAny uses the playground that is up, if there is one.
func withAny(ctx context.Context, presenter Presenter, do func(*Playground) error) error {
	p, err := Attach(ctx, presenter)
	if errors.Is(err, ErrNoneRunning) {
		return withOwn(ctx, Options{Presenter: presenter}, do)
	}
	if err != nil {
		return err
	}
	presenter.Say("Using the playground that is up: %s", p.Dir())
	defer presenter.Done()
	return errors.Join(do(p), p.Stop())
}

func (p *Playground) playAll(ctx context.Context, stories []Story) error {
	var failed []string
	for _, story := range stories {
		if result := p.Run(ctx, story); !result.OK {
			failed = append(failed, story.Name)
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("%w: %s", ErrStoryFailed, strings.Join(failed, ", "))
	}
	return nil
}

// next is what to try after the demo, or with a playground that is up.
func next(after string) string {
	lines := []string{"What to try next:"}
	switch after {
	case "all":
		lines = append(lines,
			"  bin/playground up                      keep one running, and use kubectl on it",
			"  bin/playground run stockout            one story ("+strings.Join(StoryNames(), ", ")+")",
			"  bin/playground run -f my.yaml          your own manifests",
			"  bin/playground run all -o json         one JSON object for each story")
	case "up --kueue":
		lines = append(lines,
			"  bin/control-plane/kubectl apply -f manifests/kueue/examples/capacity-check.yaml",
			"  bin/control-plane/kubectl create -f manifests/kueue/examples/job.yaml",
			"  bin/control-plane/kubectl get "+workloads+" -A",
			"  bin/control-plane/kubectl describe "+workloads,
			"  bin/playground run kueue-hint          a story, on this playground")
	default:
		lines = append(lines,
			"  bin/control-plane/kubectl create deployment web --image=any --replicas=50",
			"  bin/control-plane/kubectl set resources deployment web --requests=cpu=2",
			"  bin/control-plane/kubectl get capacityrequests,availablecapacity,upcomingnodes -A",
			"  bin/control-plane/kubectl get nodes -w",
			"  bin/playground run training            a story, on this playground",
			"  bin/playground run -f my.yaml          your own manifests, on this playground")
	}
	return strings.Join(lines, "\n")
}
