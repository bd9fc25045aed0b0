// Command playground runs all of Drover on this machine and plays stories on it. See package playground.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/drover-sh/drover/playground"
)

func main() {
	ctrllog.SetLogger(logr.Discard()) // a playground's own clients have nothing to say; components log to files
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer cancel()
	err := command().ExecuteContext(ctx)
	if err == nil {
		return
	}
	fmt.Fprintln(os.Stderr, "playground:", err)
	if ctx.Err() != nil && !errors.Is(err, playground.ErrStoryFailed) {
		os.Exit(130)
	}
	os.Exit(1)
}

func command() *cobra.Command {
	var output string
	presenter := func() (playground.Presenter, error) {
		switch output {
		case "":
			return playground.NewPeople(os.Stdout), nil
		case "json":
			return playground.JSON{Out: os.Stdout}, nil
		default:
			return nil, fmt.Errorf("-o %q: must be json, or left out", output)
		}
	}
	// with gives a command its presenter.
	with := func(do func(ctx context.Context, p playground.Presenter, args []string) error) func(*cobra.Command, []string) error {
		return func(cmd *cobra.Command, args []string) error {
			p, err := presenter()
			if err != nil {
				return err
			}
			return do(cmd.Context(), p, args)
		}
	}
	demo := with(func(ctx context.Context, p playground.Presenter, _ []string) error {
		return playground.Demo(ctx, p, playground.Stories())
	})
	root := &cobra.Command{
		Use:           "playground",
		Short:         "Runs all of Drover on this machine and plays stories on it",
		Args:          cobra.NoArgs,
		RunE:          demo,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVarP(&output, "output", "o", "", "json: one JSON object for each story")

	var kueue bool
	var files []string
	var timeout time.Duration
	run := &cobra.Command{
		Use:   "run {STORY... | all | -f FILE}",
		Short: "Play stories or your own manifests, on the playground that is up or on one of their own",
		Long: "Play stories or your own manifests, on the playground that is up or on one of their own.\n\nStories:\n" +
			describeStories(),
		ValidArgs: append(playground.StoryNames(), "all"),
		RunE: with(func(ctx context.Context, p playground.Presenter, args []string) error {
			if len(files) > 0 {
				if len(args) > 0 {
					return fmt.Errorf("either stories %q or manifests %q, not both", args, files)
				}
				return playground.RunManifests(ctx, p, files, timeout, kueue)
			}
			stories, err := playground.FindStories(args...)
			if err != nil {
				return err
			}
			if len(stories) == 0 {
				return fmt.Errorf("what? Name a story, all, or manifests with -f. Stories:\n%s", describeStories())
			}
			return playground.RunStories(ctx, p, stories)
		}),
	}
	run.Flags().StringArrayVarP(&files, "filename", "f", nil, "your own manifests; - reads standard input")
	run.Flags().BoolVar(&kueue, "kueue", false, "run the Kueue manager, too, for manifests of -f; stories know themselves")
	run.Flags().DurationVar(&timeout, "timeout", 2*time.Minute, "how long pods of -f may take to run")

	up := &cobra.Command{
		Use: "up", Short: "Keep a playground running and print its KUBECONFIG", Args: cobra.NoArgs,
		RunE: with(func(ctx context.Context, p playground.Presenter, _ []string) error {
			return playground.Up(ctx, p, kueue)
		}),
	}
	up.Flags().BoolVar(&kueue, "kueue", false, "run the Kueue manager, too, which the stories kueue-* need")

	root.AddCommand(
		&cobra.Command{Use: "demo", Short: "Start everything, play all stories, clean up (the default)", Args: cobra.NoArgs, RunE: demo},
		up,
		run,
		&cobra.Command{Use: "down", Short: "End the playground that is up", Args: cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				ctx, cancel := context.WithTimeout(cmd.Context(), time.Minute)
				defer cancel()
				dir, err := playground.Down(ctx)
				if err == nil {
					fmt.Println("ended the playground in", dir)
				}
				return err
			}},
	)
	return root
}

func describeStories() string {
	var text string
	for _, s := range playground.Stories() {
		text += fmt.Sprintf("  %-20s %s\n", s.Name, s.Title)
	}
	return text
}
