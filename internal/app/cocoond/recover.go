package cocoond

import (
	"context"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/journal"
	"cocoonstack.io/cocoon/internal/journal/records"
	"cocoonstack.io/cocoon/internal/journal/sqlite"
)

func recoverCommand(prepare func() (*daemon, error)) *cobra.Command {
	var rebuild bool
	cmd := &cobra.Command{
		Use:   "recover",
		Short: "Make the journal anew from the records in the folders of the VMs",
		Long: `Make the journal of a cocoond that is not running anew, from the records that its VMs have in their folders. Nothing of the
VMs is touched: those that run go on, and the next cocoond takes them up. The files of the old journal are kept beside
the new one. Give it the same configuration as the daemon.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !rebuild {
				return errdefs.Invalidf("--rebuild is missing; `cocoon recover` lists what a running cocoond keeps aside")
			}
			d, err := prepare()
			if err != nil {
				return err
			}
			return d.rebuild(cmd.Context(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().BoolVar(&rebuild, "rebuild", false, "replace the old journal with a new one")
	return cmd
}

func (d *daemon) journalPath() string { return filepath.Join(d.cfg.StateDir, "journal.db") }
func (d *daemon) vmDir() string       { return filepath.Join(d.cfg.StateDir, "vms") }

// openJournal opens the journal, with copies of its rows in the folders of the VMs.
func (d *daemon) openJournal(ctx context.Context) (*records.Keeper, error) {
	j, err := sqlite.Open(ctx, sqlite.Config{Path: d.journalPath(), Older: d.cfg.olderJournal, Frozen: d.cfg.frozen, Synced: d.metrics.journalSyncs.Inc})
	if err != nil {
		return nil, err
	}
	return records.New(records.Config{Dir: d.vmDir(), Older: d.cfg.olderJournal, Log: d.log.With("component", "journal")}, j), nil
}

var _ journal.Journal = (*records.Keeper)(nil)

// rebuild replaces the journal with one made from the records of the VMs, and reports the result for each.
func (d *daemon) rebuild(ctx context.Context, out io.Writer) error {
	lock, err := lockDir(ctx, d.cfg.StateDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	rows, rest, err := records.Scan(d.vmDir())
	if err != nil {
		return err
	}
	made, err := sqlite.Rebuild(ctx, sqlite.Config{Path: d.journalPath()}, rows)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d VMs are on record again.\n", made.Rows)
	if made.Aside != "" {
		fmt.Fprintf(out, "The old journal is in %s.\n", made.Aside)
	}
	for _, id := range slices.Sorted(maps.Keys(made.Left)) {
		fmt.Fprintf(out, "%s is kept aside: %v\n", id, made.Left[id])
	}
	for _, id := range rest {
		fmt.Fprintf(out, "%s is kept aside: its folder has no record that can be read\n", id)
	}
	if len(made.Left)+len(rest) > 0 {
		fmt.Fprintln(out, "When cocoond runs, `cocoon recover` lists what is kept aside.")
	}
	return nil
}
