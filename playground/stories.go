package playground

import (
	"fmt"
	"slices"
	"strings"
)

// Stories are all stories, in the order in which the demo plays them.
func Stories() []Story {
	return []Story{
		Training(), Packing(), Stockout(), Withdrawal(), ScaleFromZero(), Taints(), ConfigFailure(), StaticNodes(),
		RequestWithoutPod(), Affinity(), Schedulers(), KueueHint(), KueueProvision(), KueueTAS(), KueueStockout(), Sharding(),
		Resync(),
	}
}

// StoryNames are the names of Stories.
func StoryNames() []string {
	var names []string
	for _, s := range Stories() {
		names = append(names, s.Name)
	}
	return names
}

// FindStories returns the stories of those names; "all" stands for all of them.
func FindStories(names ...string) ([]Story, error) {
	var found []Story
	for _, name := range names {
		if name == "all" {
			found = append(found, Stories()...)
			continue
		}
		i := slices.IndexFunc(Stories(), func(s Story) bool { return s.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("story %q: there are %s, and all", name, strings.Join(StoryNames(), ", "))
		}
		found = append(found, Stories()[i])
	}
	return found, nil
}
