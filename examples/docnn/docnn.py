"""DocNN, the convolutional text classifier of Kim (2014), on sentences in SST-2's layout: `sentence<TAB>label` on each line of train.tsv and dev.tsv.

    fastdist train examples/docnn/sst2.toml learner_args.path=SST-2
"""
from collections import Counter
from fastai.basics import *
from torch.nn.utils.rnn import pad_sequence

unknown,padding = '<unk>','<pad>'

def tokens(sentence):
    "Lower-case words; SST-2 has its punctuation marks apart already"
    return re.findall(r"\w+(?:'\w+)?|[^\w\s]", sentence.lower())

def read_tsv(path):
    "(sentence, label) of each line; the first may be a header"
    rows = []
    for i,line in enumerate(Path(path).read_text(encoding='utf-8').split('\n'), 1):
        if not line.strip() or i==1 and line.strip()=='sentence\tlabel': continue
        sentence,tab,label = line.rstrip('\r').rpartition('\t')
        if not tab or not label.strip(): raise ValueError(f"{path}:{i}: {line!r} is not like sentence<TAB>label")
        rows.append((sentence,label.strip()))
    if not rows: raise ValueError(f"{path} has no sentences")
    return rows

class Sentences:
    "Numbers of the words, and of the label, of each sentence"
    def __init__(self, rows, vocab, labels):
        self.vocab,self.labels = vocab,labels
        self.items = [(self.numbers(s),tensor(labels[l])) for s,l in rows]
    def numbers(self, sentence): return tensor([self.vocab.get(o, self.vocab[unknown]) for o in tokens(sentence)], dtype=torch.long)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
    def new_empty(self): return Sentences([], self.vocab, self.labels) # what `learn.export` keeps

def pad_batch(samples, width=5, pad=0):
    "Sentences of a batch, padded at the end to the longest, or at least to the widest filter"
    xs,ys = zip(*samples)
    xs = pad_sequence([F.pad(x, (0, max(width-len(x), 0)), value=pad) for x in xs], batch_first=True, padding_value=pad)
    return xs,torch.stack(ys)

class DocNN(Module):
    "Embedding, convolutions of several widths, the largest value of each filter in the sentence, dropout, and a linear layer"
    def __init__(self, n_words, n_labels, emb_sz=100, widths=(3,4,5), n_filters=100, p=0.5, pad=0):
        self.pad,self.embedding = pad,nn.Embedding(n_words, emb_sz, padding_idx=pad)
        self.convs = nn.ModuleList(nn.Conv1d(emb_sz, n_filters, w) for w in widths)
        self.dropout,self.linear = nn.Dropout(p),nn.Linear(n_filters*len(widths), n_labels)

    def forward(self, x):
        e = self.embedding(x).transpose(1, 2)
        n = (x!=self.pad).sum(1, keepdim=True)
        return self.linear(self.dropout(torch.cat([self.largest(conv(e).relu(), n-conv.kernel_size[0]) for conv in self.convs], 1)))

    def largest(self, values, last):
        "Without places that begin after `last`: those are padding, and a sentence must not depend on how long others of its batch are"
        places = torch.arange(values.shape[2], device=values.device)
        return values.masked_fill((places > last.clamp(min=0))[:,None], 0).amax(2) # no value is below 0

def learner(path, # Folder of train.tsv and dev.tsv
            tiny=False, # Read train_tiny.tsv and dev_tiny.tsv instead?
            bs=64, # Sentences of a batch
            emb_sz=100, # Numbers for each word
            widths=(3,4,5), # Words that a filter sees
            n_filters=100, # Filters of each width
            p=0.5, # Of dropout
            min_freq=2, # How often a word must be in the training set to be known
            wd=0.01, # Weight decay
           ):
    "A `Learner` of sentences' labels"
    train,dev = (read_tsv(Path(path)/f"{o}{'_tiny' if tiny else ''}.tsv") for o in ('train','dev'))
    counts = Counter(o for s,_ in train for o in tokens(s))
    vocab = {o:i for i,o in enumerate([padding, unknown, *sorted(o for o,n in counts.items() if n >= min_freq)])}
    labels = {o:i for i,o in enumerate(sorted({l for _,l in train}))}
    if more := {l for _,l in dev}-set(labels): raise ValueError(f"{path}: dev.tsv has labels {sorted(more)}, which train.tsv has not")
    batch = partial(pad_batch, width=max(widths))
    dls = DataLoaders(*(TfmdDL(Sentences(o, vocab, labels), bs=bs, shuffle=o is train, create_batch=batch, num_workers=0) for o in (train,dev)), device=default_device())
    return Learner(dls, DocNN(len(vocab), len(labels), emb_sz, widths, n_filters, p), loss_func=CrossEntropyLossFlat(), metrics=accuracy, wd=wd)

def classify(learn, sentences):
    "The label of each sentence, from a learner that was trained, or loaded by `load_learner`"
    ds = learn.dls.dataset
    xs,_ = pad_batch([(ds.numbers(s),tensor(0)) for s in sentences], max(conv.kernel_size[0] for conv in learn.model.convs))
    model = learn.model.eval()
    with torch.no_grad(): found = model(xs.to(next(model.parameters()).device)).argmax(1)
    return [list(ds.labels)[i] for i in found.tolist()]
