package cli

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/textui"
)

func (a *app) vmLogsCommand() *cobra.Command {
	var o guest.LogOptions
	var since string
	var stamps bool
	var out textui.Format
	cmd := &cobra.Command{
		Use:   "logs REF",
		Short: "Print the output of a VM's main process",
		Long: `Print the output of a VM's main process, standard output and error together.

With --serial, and always for a VM of a disk image, it is the output of the serial console.` + refHelp,
		Example: `  cocoon vm logs -f web
  cocoon vm logs --tail 20 --timestamps web
  cocoon vm logs --since 10m web
  cocoon vm logs --previous web                # of the run before this one`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVMs,
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if o.Since, err = parseSince(since, time.Now()); err != nil {
				return err
			}
			p := printer{w: a.Stdout, stamps: stamps}
			show := p.print
			if out == textui.FormatJSON {
				enc := json.NewEncoder(a.Stdout)
				show = func(e guest.LogEntry) error { return enc.Encode(e) }
			}
			return a.withClient(func(c *nodeclient.Client) error { return c.Logs(cmd.Context(), args[0], o, show) })
		},
	}
	f := cmd.Flags()
	f.BoolVarP(&o.Follow, "follow", "f", false, "go on until the VM ends")
	f.IntVarP(&o.Tail, "tail", "n", -1, "only so many of the last entries (default: all)")
	f.StringVar(&since, "since", "", "only newer than a time (2026-11-21T10:00:00Z) or a span (10m)")
	f.BoolVar(&stamps, "timestamps", false, "put the time before each line")
	f.BoolVarP(&o.Previous, "previous", "p", false, "of the run before this one")
	f.StringVarP(&o.Container, "container", "c", "", "of this container, where the VM has several (default: its first app)")
	f.BoolVar(&o.Serial, "serial", false, "of the serial console")
	textui.OutputFlag(cmd, &out)
	f.Lookup("output").Usage = "table: as it was written; json: an object per entry"
	return cmd
}

func parseSince(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339Nano, s); err == nil {
		return t, nil
	}
	return time.Time{}, errdefs.Invalidf("--since %q is neither a span like 10m nor a time like 2026-11-21T10:00:00Z", s)
}

// printer writes entries; with stamps every line begins with the time its first byte was written.
type printer struct {
	w      io.Writer
	stamps bool
	inLine bool // the last byte written was not a newline
}

func (p *printer) print(e guest.LogEntry) error {
	data := e.Data
	if !p.stamps {
		if _, err := p.w.Write(data); err != nil {
			return fmt.Errorf("write log: %w", err)
		}
		return nil
	}
	stamp := e.Time.UTC().Format("2006-01-02T15:04:05.000000000Z07:00") + " "
	var out []byte
	for len(data) > 0 {
		if !p.inLine {
			out = append(out, stamp...)
		}
		n := bytes.IndexByte(data, '\n') + 1
		if p.inLine = n == 0; p.inLine {
			n = len(data)
		}
		out, data = append(out, data[:n]...), data[n:]
	}
	if _, err := p.w.Write(out); err != nil {
		return fmt.Errorf("write log: %w", err)
	}
	return nil
}
