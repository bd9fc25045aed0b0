package watchgroup

import "testing"

// When the API server has been killed and is back, members have stopped meanwhile or gone on, and nobody has two owners.
func TestAnAPIServerRestartIsSurvived(t *testing.T) {
	c, ns := api(t)
	k := newCast(t, c, newGroup(t, c, ns, nil))
	start(t, apiServer, coordinate)
	k.join("a", nil)
	b := k.join("b", nil)
	k.share(map[string]int{"a": 50, "b": 50})
	if err := plane.RestartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.share(map[string]int{"a": 50, "b": 50})
	k.join("c", nil)
	k.shareAlike("a", "b", "c")
	b.kill()
	k.share(map[string]int{"a": 50, "c": 50})
	k.quiet(2)
}
