package autoscaler

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/drover-sh/drover/autoscaler/provider"
)

// forgetful is a provider whose list lacks a machine now and then.
type forgetful struct {
	provider.Interface
	hidden *string
}

func (f forgetful) List(ctx context.Context, cluster string) ([]provider.Instance, error) {
	list, err := f.Interface.List(ctx, cluster)
	return slices.DeleteFunc(list, func(i provider.Instance) bool { return i.ID == *f.hidden }), err
}

// A list that lacks a machine once costs at most a machine too many for a while. The machine itself, on which pods run all
// the time, is found again and not ended.
func TestAMachineThatAListLacksOnceIsNotEnded(t *testing.T) {
	hidden := ""
	w := newWorld(t, testPolicy(), small(100))
	w.wrap = func(p provider.Interface) provider.Interface { return forgetful{p, &hidden} }
	w.start()
	w.active("east", 2)
	busy := w.cloud.Machines()[0].ID
	// The cluster gives back whatever it is asked for, but for the machine with the pods.
	w.operator("east").refuse = func(id string) string {
		if id == busy {
			return "busy"
		}
		return ""
	}
	w.clock.Step(time.Second)
	hidden = busy
	w.runner.Survey(t.Context())
	hidden = ""
	w.turn()
	if w.runner.engine.clusters["east"].machines[busy] != nil {
		t.Fatal("the machine that is not listed still counts, and the test proves nothing")
	}
	w.advance(10 * time.Minute)
	w.want("east", states{Active: 2})
	if !slices.ContainsFunc(w.cloud.Machines(), func(r provider.Request) bool { return r.ID == busy }) {
		t.Error("a busy machine was ended because one list lacked it")
	}
}
