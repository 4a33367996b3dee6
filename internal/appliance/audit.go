package appliance

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/journal"
)

// maxAudit is the number of entries that are kept.
const maxAudit = 2000

// audit keeps who changed what.
type audit struct {
	docs journal.Documents
	log  *slog.Logger

	mu   sync.Mutex
	next int64
	all  []auditEntry // the oldest first
}

type auditEntry struct {
	name string // of its document
	*capsulev1.AuditEntry
}

func openAudit(ctx context.Context, docs journal.Documents, log *slog.Logger) (*audit, error) {
	a := &audit{docs: docs, log: log, next: 1}
	stored, err := docs.List(ctx, journal.Audit)
	if err != nil {
		return nil, err
	}
	for _, d := range stored {
		e := &capsulev1.AuditEntry{}
		if err := protojson.Unmarshal(d.Data, e); err != nil {
			log.Warn("an entry of the audit log is damaged", "entry", d.Name, "err", err)
			continue
		}
		a.all = append(a.all, auditEntry{d.Name, e})
		_, _ = fmt.Sscan(strings.TrimLeft(d.Name, "0"), &a.next) // a name of another form leaves it
		a.next++
	}
	return a, nil
}

// add adds an entry, and sets its time. It is stored if somebody with a key is behind it: strangers must not push out what operators did.
func (a *audit) add(ctx context.Context, e *capsulev1.AuditEntry, store bool) {
	now := time.Now()
	e.TimeUnix = now.Unix()
	e.Object = strings.ToValidUTF8(e.GetObject(), "�")
	e.Object = e.Object[:min(len(e.Object), 128)]
	a.log.Info("call", "method", e.GetMethod(), "object", e.GetObject(), "code", e.GetCode(), "key", e.GetName(), "kid", e.GetKid(), "peer", e.GetPeer())
	if !store {
		return
	}
	data, err := protojson.Marshal(e)
	if err != nil {
		a.log.Warn("an entry of the audit log is not stored", "err", err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	entry := auditEntry{fmt.Sprintf("%019d", a.next), e}
	a.next++
	a.all = append(a.all, entry)
	changes := []journal.Change{{Table: journal.Audit, Name: entry.name, Data: data}}
	for len(a.all) > maxAudit {
		changes = append(changes, journal.Change{Table: journal.Audit, Name: a.all[0].name})
		a.all = slices.Delete(a.all, 0, 1)
	}
	if err := a.docs.Write(context.WithoutCancel(ctx), changes...); err != nil {
		a.log.Error("an entry of the audit log is not stored", "err", err)
	}
}

// last returns the last entries, the oldest first; all, if n is 0.
func (a *audit) last(n int) []*capsulev1.AuditEntry {
	a.mu.Lock()
	defer a.mu.Unlock()
	from := 0
	if n > 0 {
		from = max(0, len(a.all)-n)
	}
	var out []*capsulev1.AuditEntry
	for _, e := range a.all[from:] {
		out = append(out, e.AuditEntry)
	}
	return out
}
