package capacity

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// A set that has to share a rack and does not say how large it will be grows from roll-up to roll-up, and cannot move once it
// runs: it gets the rack where most is left.
func TestAnOpenSetGetsTheDomainWithMostRoomToGrow(t *testing.T) {
	const rackKey = "topology.kubernetes.io/rack"
	profile := Profile{
		Requirements: []Requirement{{Key: rackKey, Operator: OperatorSame}},
		Resources:    ResourcesOf(corev1.ResourceList{"cpu": resource.MustParse("8")}),
		Group:        &Group{Name: "ns/set"},
	}.Canonical()
	need := Need{ID: profile.ID(), Profile: profile, Count: 3, Pending: 3}
	var domains []Domain
	for name, available := range map[string]int32{"rack-1": 40, "rack-2": 64, "rack-3": 52} {
		domains = append(domains, Domain{Name: name, Labels: map[string]string{rackKey: name}, Available: available})
	}
	plan := MakePlan(Input{
		Offerings: []Offering{{
			Name: "cpu", Cost: 1, Domains: domains,
			Allocatable: ResourcesOf(corev1.ResourceList{"cpu": resource.MustParse("8"), "pods": resource.MustParse("110")}),
		}},
		Clusters: []ClusterInput{{ID: "a", Needs: []Need{need}}},
	})
	if len(plan.Launches) != 3 {
		t.Fatalf("%d launches, expected 3", len(plan.Launches))
	}
	for _, l := range plan.Launches {
		if l.Domain != "rack-2" {
			t.Errorf("launched in %s, expected rack-2, which has room for most", l.Domain)
		}
	}
}
